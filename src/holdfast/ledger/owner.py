"""Whose ledger it is: a ledger belongs to one namespace, which the first one to open it writes down.

Two engines in one ledger would mix their jobs, and each would restore the other's. So would two of the same namespace;
those cannot be told from one that has moved, so they are only warned of: the ledger notes by which address its engine
was last reached.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from holdfast.errors import InvalidOption

_log: Final = logging.getLogger("holdfast.ledger")

READ_OWNER: Final = "SELECT namespace, engine FROM ledger_owner"
_REDIS_PORT: Final = 6379
#: The default namespace has no name.
_DEFAULT: Final = "(the default one)"


def check_owner(where: str, found: str, namespace: str) -> None:
    """Raises `InvalidOption` for somebody else's ledger."""
    if found != namespace:
        raise InvalidOption(
            f"the ledger {where} belongs to namespace {found or _DEFAULT}, this is {namespace or _DEFAULT}; "
            "set HOLDFAST_NAMESPACE to that, or give this one a ledger of its own"
        )


def is_another(where: str, found: str, engine: str) -> bool:
    """Whether the ledger was last used with another engine, or another name of it; the log says so."""
    if found == engine or not engine:
        return False
    if found:
        _log.warning(
            "the ledger %s was last used with the engine %s, this is %s. If both are in use, give each a ledger of its "
            "own: they would run each other's jobs. If it has moved, or is the same by another name, all is well",
            where,
            found,
            engine,
        )
    return True


def engine_name(url: str) -> str:
    """An engine's address as the ledger notes it: kind, host, port and database, without user and password."""
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return f"sqlite:///{Path(unquote(parts.path[1:])).resolve()}"
    if "+" in parts.scheme:
        # Sentinels, or nodes of a Cluster; the order in which they are named says nothing.
        hosts = ",".join(sorted(parts.netloc.rpartition("@")[2].lower().split(",")))
        return f"{parts.scheme}://{hosts}/{parts.path.strip('/')}"
    database = parts.path.strip("/") or "0"
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or _REDIS_PORT}/{database}"
