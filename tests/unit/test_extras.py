"""Installed modules are found without importing them; missing ones are named with the command that installs them."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest

from holdfast import Holdfast
from holdfast.errors import MissingExtra, UsageError
from holdfast.extras import EXTRAS, loop_factory, missing, require, require_drivers

ALL = [module for modules in EXTRAS.values() for module in modules]
#: Modules of the extra `test`, which every test environment has.
INSTALLED = [module for extra in ("http", "postgres", "redis") for module in EXTRAS[extra]]


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)


def test_installed_modules_are_not_missing() -> None:
    assert missing("everything", *INSTALLED) is None


def test_all_missing_extras_are_named_in_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "hiredis", "asyncpg", "alembic")
    with pytest.raises(MissingExtra) as caught:
        require("this", "hiredis", "httpx", "alembic", "asyncpg")
    assert str(caught.value) == (
        "this needs hiredis, alembic and asyncpg, not installed; run: pip install 'holdfast[postgres,redis]'"
    )
    assert caught.value.extras == ("postgres", "redis")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("module", [module for module in ALL if "." in module])
def test_a_module_without_its_package_is_missing(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, module.partition(".")[0])
    assert missing("this", module) is not None


def test_a_module_that_a_test_has_added_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hiredis", ModuleType("hiredis"))
    assert missing("this", "hiredis") is None


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("redis://h", "redis"),
        ("rediss+cluster://h", "redis"),
        ("postgres://h/d", "postgres"),
        ("postgresql://h/d", "postgres"),
        ("sqlite:///x.db", ""),
        (None, ""),
    ],
)
def test_a_url_names_the_driver_that_it_needs(url: str | None, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "hiredis", "asyncpg")
    if not extra:
        require_drivers(url)
        return
    with pytest.raises(MissingExtra) as caught:
        require_drivers("sqlite:///x.db", url, None)
    assert caught.value.extras == (extra,)
    assert str(caught.value).startswith(f"{(url or '').partition('://')[0]}:// needs ")


def test_an_app_is_not_created_without_its_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "hiredis", "asyncpg")
    with pytest.raises(MissingExtra, match=r"^redis:// and postgresql:// need"):
        Holdfast("redis://127.0.0.1:9", ledger="postgresql://127.0.0.1:9/ledger")


def test_without_uvloop_asyncios_own_loop_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop_factory() is not None
    hide(monkeypatch, "uvloop")
    assert loop_factory() is None
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert type(runner.get_loop()).__module__.startswith("asyncio")
