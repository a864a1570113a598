"""`HOLDFAST_*` variables: files with secrets, and warnings about variables that are not read.

`HOLDFAST_URL_FILE` names a file with the value of `HOLDFAST_URL`, as Docker and Kubernetes mount secrets. A variable
that is not read is most likely a misspelt setting. No message contains a value, which may be a secret.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from holdfast.errors import InvalidOption

PREFIX: Final = "HOLDFAST_"
#: Settings that carry secrets: each can be in a file that the variable with `_FILE` names.
SECRETS: Final = frozenset({"url", "ledger", "token", "webhook_secret", "webhooks", "outbox_url", "outbox_targets"})
_JSON: Final = frozenset({"webhooks", "outbox_targets"})
_FILE: Final = "_FILE"

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


def read_secret_files(environment: Mapping[str, str], settings: Collection[str]) -> dict[str, Any]:
    """The values of these settings that are in files, without white space at their ends.

    Raises `InvalidOption` for a file that cannot be read or is empty, and for a setting that is in a variable too.
    """
    given = {name.upper(): value for name, value in environment.items() if value}
    found: dict[str, Any] = {}
    for setting in sorted(SECRETS.intersection(settings)):
        variable = f"{PREFIX}{setting.upper()}"
        if (path := given.get(variable + _FILE)) is None:
            continue
        if variable in given:
            raise InvalidOption(f"settings: both {variable} and {variable}{_FILE} are set; unset one of them")
        text = _read_secret(f"{variable}{_FILE}", path)
        found[setting] = _decode_secret(f"{variable}{_FILE}", text) if setting in _JSON else text
    return found


def _read_secret(variable: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip()
    except UnicodeDecodeError:
        raise InvalidOption(f"settings: {variable}: file {path!r} is not UTF-8 text") from None
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidOption(f"settings: {variable}: cannot read file {path!r}: {reason}") from None
    if not text:
        raise InvalidOption(f"settings: {variable}: file {path!r} is empty")
    return text


def _decode_secret(variable: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # Not chained: the error has the text.
        raise InvalidOption(f"settings: {variable}: the file has no valid JSON") from None


def warn_about_unknown(environment: Mapping[str, str], settings: Collection[str]) -> None:
    """Log each variable that is not one of these settings, once per process, with the nearest name."""
    known = [f"{PREFIX}{name.upper()}" for name in settings]
    known += [f"{PREFIX}{name.upper()}{_FILE}" for name in SECRETS]
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
