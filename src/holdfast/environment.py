"""Variables that begin with `HOLDFAST_` and that nothing reads: most likely a setting that is misspelt.

A warning, never an error, and never with the value: it may be a secret.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Final

PREFIX: Final = "HOLDFAST_"

_log: Final = logging.getLogger("holdfast.settings")

#: Of the project's own tests.
_TESTS: Final = "HOLDFAST_TEST_"
#: What Kubernetes sets in every pod beside a service that is named holdfast, or holdfast-….
_SERVICE: Final = re.compile(
    r"HOLDFAST_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_PORT: Final = re.compile(r"HOLDFAST_(?:\w+_)?PORT")
_SERVICE_URL: Final = re.compile(r"(?:tcp|udp|sctp)://")

#: Variables that a file of triggers names.
_read: Final[set[str]] = set()
_reported: Final[set[str]] = set()


def mark_read(name: str) -> None:
    """Something besides the settings reads this variable."""
    _read.add(name.upper())


def warn_about_unknown(environment: Mapping[str, str], settings: Collection[str]) -> None:
    """Log the variables that are none of these settings, each once in a process, with the nearest name."""
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    for given, value in environment.items():
        name = given.upper()
        if not name.startswith(PREFIX) or name in _reported or _is_known(name, value, known):
            continue
        _reported.add(name)
        # Without what all names have in common, which would make all of them alike.
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
