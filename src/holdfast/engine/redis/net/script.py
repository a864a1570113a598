"""Lua scripts: their text, put together from shared files, and their hash.

A script contains only what it uses of the constants and the shared files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

from holdfast.core.states import MOVES
from holdfast.engine.port.jobs import MAX_TENANTS

#: Scripts that receive the epoch, and the index of that argument; left alone if it is empty.
_EPOCH_ARGUMENT: Final[Mapping[str, int]] = {"submit": 6}

#: Files that scripts share, in this order; each may use what is before it.
_SHARED: Final = ("_prelude", "_lanes")
#: The names that a statement at the top level of a shared file defines.
_defines: Final = re.compile(r"local (?:function )?(\w+(?:, \w+)*)").match
_words: Final = re.compile(r"\w+").findall
_comments: Final = re.compile(r"(?m)^\s*--.*$")


class Script:
    """A Lua script: what it uses of the constants and the shared files, and the file itself."""

    def __init__(self, name: str) -> None:
        folder = files("holdfast.engine.redis") / "lua"
        own = (folder / f"{name}.lua").read_text()
        shared = [_constants(), *((folder / f"{part}.lua").read_text() for part in _SHARED)]
        self.name = name
        self.source = "\n".join([*_used_statements(own, shared), own]).encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()
        #: Index of the argument that is the epoch of the server.
        self.epoch_at = _EPOCH_ARGUMENT.get(name)


def _used_statements(own: str, shared: Sequence[str]) -> list[str]:
    """The statements of shared files that a script uses, directly or through others.

    Redis runs all of a script for each call: every function and table that it does not need takes time.
    """
    statements: list[str] = []
    for line in filter(None, _comments.sub("", "\n".join(shared)).splitlines()):
        if line.startswith("local "):
            statements.append(line)
        else:
            statements[-1] += f"\n{line}"
    words, used = set(_words(_comments.sub("", own))), []
    for statement in reversed(statements):
        names = _defines(statement)
        assert names is not None
        if words.intersection(_words(names[1])):
            words.update(_words(statement))
            used.append(statement)
    return used[::-1]


def _constants() -> str:
    """The transition table and the number of lanes as Lua, so that scripts do not repeat them."""
    moves = (
        f"{state} = {{ {', '.join(f'{target} = true' for target in sorted(targets))} }}"
        for state, targets in MOVES.items()
        if state is not None
    )
    return f"local MOVES = {{ {', '.join(moves)} }}\nlocal LANES = {MAX_TENANTS}"
