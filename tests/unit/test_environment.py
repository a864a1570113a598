"""Misspelt `HOLDFAST_*` variables are reported once, with the nearest name and without their value."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from holdfast import environment
from holdfast.settings import Settings
from holdfast.triggers.config_file import load_text

SECRET = "hunter2-in-the-wrong-variable"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "_reported", set())
    monkeypatch.setattr(environment, "_read", set())


def test_a_misspelt_variable_is_reported_once_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_LEGDER", f"postgresql://u:{SECRET}@h/db")
    monkeypatch.setenv("HOLDFAST_ODD", SECRET)
    with caplog.at_level(logging.WARNING, "holdfast.settings"):
        Settings.load()
        Settings.load()
    assert sorted(caplog.messages) == [
        "environment variable HOLDFAST_LEGDER is not a setting and is ignored; did you mean HOLDFAST_LEDGER?",
        "environment variable HOLDFAST_ODD is not a setting and is ignored; see docs/reference/settings.md",
    ]
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HOLDFAST_PORT", "tcp://10.0.0.1:8080"),
        ("HOLDFAST_PORT", "8080"),
        ("HOLDFAST_SERVICE_HOST", "10.0.0.1"),
        ("HOLDFAST_SERVICE_PORT", "8080"),
        ("HOLDFAST_SERVICE_PORT_HTTP", "8080"),
        ("HOLDFAST_PORT_8080_TCP", "tcp://10.0.0.1:8080"),
        ("HOLDFAST_PORT_8080_TCP_PROTO", "tcp"),
        ("HOLDFAST_PORT_8080_TCP_PORT", "8080"),
        ("HOLDFAST_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("HOLDFAST_API_SERVICE_HOST", "10.0.0.1"),
        ("HOLDFAST_API_PORT", "tcp://10.0.0.1:8080"),
        ("HOLDFAST_API_PORT_53_UDP", "udp://10.0.0.1:53"),
        ("HOLDFAST_TEST_REDIS_URL", "redis://127.0.0.1:1/0"),
        ("HOLDFAST_OUTBOX_TARGETS__DEFAULT__TYPE", "memory"),
        ("holdfast_group", "workers"),
    ],
)
def test_variables_of_other_programs_and_known_settings_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    Settings.load()
    assert caplog.messages == []


def test_a_misspelt_port_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("HOLDFAST_METRICS_PORT", "9100")
    Settings.load()
    assert "HOLDFAST_METRICS_PORT is not a setting" in caplog.text


def test_variables_of_a_triggers_file_are_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOLDFAST_BROKER", "orders")
    load_text(
        "{queue_name: '${HOLDFAST_BROKER}', consumer_group: g, adapter: {type: memory}, runtime: {task: t}}"
    )  # fmt: skip
    Settings.load()
    assert caplog.messages == []
