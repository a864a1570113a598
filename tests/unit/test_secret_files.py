"""Settings with secrets can be read from files, as Docker and Kubernetes mount them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast import environment
from holdfast.errors import InvalidOption
from holdfast.settings import Settings

SECRET = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
VALUES = {
    "url": "redis://:swordfish@127.0.0.1:1/0",
    "ledger": "postgresql://u:swordfish@127.0.0.1:1/db",
    "token": "hf_token",
    "webhook_secret": SECRET,
    "webhooks": f'[{{"url": "https://example.org/", "events": ["job.*"], "secret": "{SECRET}"}}]',
    "outbox_url": "postgresql://u:swordfish@127.0.0.1:1/outbox",
    "outbox_targets": '{"default": {"type": "kafka", "connection": {"password": "swordfish"}}}',
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_reported", set())
    for name in VALUES:
        monkeypatch.delenv(f"HOLDFAST_{name.upper()}", raising=False)


def write(monkeypatch: pytest.MonkeyPatch, folder: Path, **values: str) -> None:
    for name, value in values.items():
        (folder / name).write_text(value)
        monkeypatch.setenv(f"HOLDFAST_{name.upper()}_FILE", str(folder / name))


def test_every_setting_with_a_secret_can_be_in_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(VALUES) == environment.SECRETS
    for name, value in VALUES.items():
        monkeypatch.setenv(f"HOLDFAST_{name.upper()}", value)
    expected = Settings.load()
    for name in VALUES:
        monkeypatch.delenv(f"HOLDFAST_{name.upper()}")
    write(monkeypatch, tmp_path, **{name: f"{value} \r\n\n" for name, value in VALUES.items()})
    with caplog.at_level(logging.WARNING, "holdfast.settings"):
        assert Settings.load() == expected
    assert caplog.messages == []


def test_an_argument_takes_precedence_and_the_file_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_URL_FILE", "/nowhere/url")
    assert Settings.load(url="sqlite:///mine.db").url == "sqlite:///mine.db"


def test_a_file_takes_precedence_over_holdfast_toml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text('url = "sqlite:///toml.db"\n')
    write(monkeypatch, tmp_path, url="sqlite:///file.db")
    assert Settings.load().url == "sqlite:///file.db"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read file .*No such file"),
        (b"\n", "is empty"),
        (b"\xff\xfe", "not UTF-8"),
        (b"{", "no valid JSON"),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    monkeypatch.setenv("HOLDFAST_OUTBOX_TARGETS_FILE", str(tmp_path / "secret"))
    with pytest.raises(InvalidOption, match=f"HOLDFAST_OUTBOX_TARGETS_FILE: .*{message}") as caught:
        Settings.load()
    assert caught.value.__cause__ is None


def test_a_variable_and_a_file_for_the_same_setting_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(monkeypatch, tmp_path, token="one")
    monkeypatch.setenv("HOLDFAST_TOKEN", "two")
    with pytest.raises(InvalidOption, match="both HOLDFAST_TOKEN and HOLDFAST_TOKEN_FILE"):
        Settings.load()


def test_an_engine_in_memory_does_not_read_files_of_other_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LEDGER", "OUTBOX_URL", "OUTBOX_TARGETS", "WEBHOOKS", "WEBHOOK_SECRET"):
        monkeypatch.setenv(f"HOLDFAST_{name}_FILE", "/nowhere")
    assert Settings.load(url="sqlite://").ledger is None


def test_other_settings_have_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(monkeypatch, tmp_path, group="workers")
    assert Settings.load().group == "cg:workers"
    assert "HOLDFAST_GROUP_FILE is not a setting" in caplog.text
