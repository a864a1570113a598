"""A script is loaded with the shared statements that it uses, and no others: Redis runs all of it for each call."""

from __future__ import annotations

from importlib.resources import files

import pytest

from holdfast.engine.redis.net.script import Script

FOLDER = files("holdfast.engine.redis") / "lua"
NAMES = sorted(each.name.removesuffix(".lua") for each in FOLDER.iterdir() if each.name.endswith(".lua"))


def shared_part(name: str) -> str:
    """What precedes the file itself."""
    source = Script(name).source.decode()
    own = (FOLDER / f"{name}.lua").read_text()
    assert source.endswith(own)
    return source.removesuffix(own)


def test_unused_statements_are_left_out() -> None:
    """The table of moves is large, and most scripts do not need it."""
    assert "local MOVES = {" in shared_part("move")
    assert "MOVES" not in shared_part("submit")
    assert "function declared_streams" not in shared_part("restore_keys")


def test_statements_that_others_use_are_included_before_them() -> None:
    shared = shared_part("restore_keys")
    assert "format_integer" in (FOLDER / "restore_keys.lua").read_text()
    assert shared.index("local FINGERPRINT") < shared.index("local function key_value")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("_")])
def test_a_shared_part_has_whole_statements(name: str) -> None:
    shared = shared_part(name)
    openings = shared.count("local function ")
    assert shared.count("\nend\n") >= openings
    assert "\n--" not in shared
