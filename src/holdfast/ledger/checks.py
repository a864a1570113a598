"""Ownership of a ledger by one namespace, and the `doctor` findings common to all stores.

The first process to open a ledger records its namespace. Two engines in one ledger would mix their jobs, and each would
restore the other's, so another namespace is refused (`check_owner`). Two engines of the same namespace cannot be
distinguished from one that has moved. The ledger therefore records the address of the engine it was last used with, and
`engine_changed` only logs a warning.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from holdfast.engine.port.reads import Finding
from holdfast.errors import InvalidOption
from holdfast.ledger.port.messages import OutboxBacklog

_log: Final = logging.getLogger("holdfast.ledger")

READ_OWNER: Final = "SELECT namespace, engine FROM ledger_owner"
_REDIS_PORT: Final = 6379
#: The default namespace has no name.
_DEFAULT: Final = "(the default one)"


def check_owner(where: str, found: str, namespace: str) -> None:
    """Raise `InvalidOption` if the ledger belongs to another namespace."""
    if found != namespace:
        raise InvalidOption(
            f"the ledger {where} belongs to namespace {found or _DEFAULT}, this is {namespace or _DEFAULT}; "
            "set HOLDFAST_NAMESPACE to the ledger's namespace, or use another ledger"
        )


def engine_changed(where: str, found: str, engine: str) -> bool:
    """Whether the ledger was last used with an engine at another address; logs a warning if so."""
    if found == engine or not engine:
        return False
    if found:
        _log.warning(
            "the ledger %s was last used with the engine %s, this is %s; if both are in use, give each its own ledger, "
            "because they would run each other's jobs; if the engine has moved or was renamed, ignore this warning",
            where,
            found,
            engine,
        )
    return True


def engine_name(url: str) -> str:
    """An engine's address as the ledger records it.

    Kind, host, port and database, without user and password.
    """
    parts = urlsplit(url)
    if parts.scheme == "sqlite":
        return f"sqlite:///{Path(unquote(parts.path[1:])).resolve()}"
    if "+" in parts.scheme:
        # Sentinels or nodes of a Cluster: their order does not matter.
        hosts = ",".join(sorted(parts.netloc.rpartition("@")[2].lower().split(",")))
        return f"{parts.scheme}://{hosts}/{parts.path.strip('/')}"
    database = parts.path.strip("/") or "0"
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or _REDIS_PORT}/{database}"


#: If events wait longer than this, probably no relay runs.
_LONG_MS = 10 * 60_000


def outbox_findings(backlog: OutboxBacklog, now_ms: int) -> list[Finding]:
    """Findings about unpublished and dead events, if there are any."""
    findings = []
    if backlog.waiting:
        age_ms = max(0, now_ms - (backlog.oldest_ms or now_ms))
        late = age_ms > _LONG_MS
        found = f"{backlog.waiting} events wait to be published, the oldest for {_age(age_ms)}"
        advice = "check that `holdfast outbox relay` runs with their destinations, and that their broker is up"
        findings.append(Finding("outbox", not late, found, advice if late else "", warning=late))
    if backlog.dead:
        advice = "see the causes with `holdfast outbox list --status DEAD`, then run `holdfast outbox retry`"
        found = f"{backlog.dead} events could not be published and are dead"
        findings.append(Finding("outbox dead", False, found, advice, warning=True))
    return findings


def _age(ms: int) -> str:
    minutes = ms // 60_000
    if minutes < 1:
        return f"{ms // 1000} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h"
