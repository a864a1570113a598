"""Warnings about `HOLDFAST_*` variables that are not read, most likely misspelt settings.

A warning never contains the value, which may be a secret.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Final

PREFIX: Final = "HOLDFAST_"

_log: Final = logging.getLogger("holdfast.settings")

#: Used by the project's own tests.
_TESTS: Final = "HOLDFAST_TEST_"
#: Variables that Kubernetes sets in every pod for a service named holdfast or holdfast-….
_SERVICE: Final = re.compile(
    r"HOLDFAST_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_PORT: Final = re.compile(r"HOLDFAST_(?:\w+_)?PORT")
_SERVICE_URL: Final = re.compile(r"(?:tcp|udp|sctp)://")

#: Variables that a trigger file names.
_read: Final[set[str]] = set()
_reported: Final[set[str]] = set()


def mark_read(name: str) -> None:
    """Mark a variable as read by something besides the settings."""
    _read.add(name.upper())


def warn_about_unknown(environment: Mapping[str, str], settings: Collection[str]) -> None:
    """Log each variable that is not one of these settings, once per process, with the nearest name."""
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    for given, value in environment.items():
        name = given.upper()
        if not name.startswith(PREFIX) or name in _reported or _is_known(name, value, known):
            continue
        _reported.add(name)
        # Without the common prefix, which would make all names similar.
        nearest = get_close_matches(name.removeprefix(PREFIX).lower(), settings, 1)
        advice = f"did you mean {PREFIX}{nearest[0].upper()}?" if nearest else "see docs/reference/settings.md"
        _log.warning("environment variable %s is not a setting and is ignored; %s", given, advice)


def _is_known(name: str, value: str, known: Collection[str]) -> bool:
    if name.partition("__")[0] in known or name in _read or name.startswith(_TESTS):
        return True
    if _SERVICE.fullmatch(name) or name == f"{PREFIX}PORT":
        return True
    # Kubernetes sets a URL; a misspelt setting would be a number.
    return _SERVICE_PORT.fullmatch(name) is not None and _SERVICE_URL.match(value) is not None
