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
from holdfast.engine.redis.net.errors import UNVERIFIED

#: Scripts that move jobs or grant leases, and the index (from 1) of the key with the queue's controls. They answer
#: `UNVERIFIED` until the queue has been verified in the epoch of the server.
_GATED: Final[Mapping[str, int]] = {
    "claim": 6,
    "claim_due_retries": 6,
    "claim_job": 9,
    "reclaim": 6,
    "settle": 14,
    "move": 14,
    "promote": 7,
    "adopt": 9,
    "read_messages": 5,
    "expedite": 6,
}
#: Further scripts that compare the epoch themselves.
_EPOCH_AWARE: Final = frozenset({"submit", "renew", "restore", "open_gate", "stats"})

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
        #: Whether its last argument is the epoch of the server ('': there is no ledger), which the connection adds.
        self.needs_epoch = name in _GATED or name in _EPOCH_AWARE
        self.source = "\n".join([*_gate(name), *_used_statements(own, shared), own]).encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


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


def _gate(name: str) -> list[str]:
    """The first lines of a script that needs the epoch. What follows does not have that argument."""
    statements: list[str] = []
    if name in _GATED or name in _EPOCH_AWARE:
        statements.append("local EPOCH = table.remove(ARGV)")
    if name in _GATED:
        is_closed = f"EPOCH ~= '' and redis.call('HGET', KEYS[{_GATED[name]}], 'cleared') ~= EPOCH"
        statements.append(f"if {is_closed} then return redis.error_reply('{UNVERIFIED}') end")
    return statements


def _constants() -> str:
    """The transition table and the number of lanes as Lua, so that scripts do not repeat them."""
    moves = (
        f"{state} = {{ {', '.join(f'{target} = true' for target in sorted(targets))} }}"
        for state, targets in MOVES.items()
        if state is not None
    )
    return f"local MOVES = {{ {', '.join(moves)} }}\nlocal LANES = {MAX_TENANTS}"
