"""The sandbox of a run: a separate namespace, schema or file on the deployment's servers.

Everything a run writes carries the run's name. `Sandbox.create` makes the sandbox and `Sandbox.remove` deletes it; what
could not be deleted is listed in `left`. The deployment's own jobs, tables and files are not touched: no key without
the run's name is written or deleted, except the one that lists the runs.

A name contains the time its run began. A run takes a minute at most, so what a killed run left is removed by the next
one once it is an hour old.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from holdfast.errors import HoldfastError, InvalidOption
from holdfast.extras import require
from holdfast.factory import sqlite_path
from holdfast.settings import Settings

if TYPE_CHECKING:
    from holdfast.verification.acceptance.sandbox_postgres import PostgresSandbox
    from holdfast.verification.acceptance.sandbox_redis import RedisSandbox


PREFIX: Final = "holdfast-verify-"
#: A run that began earlier than this has ended or was killed.
OLD_MS: Final = 3_600_000

_NAME: Final = re.compile(r"holdfast[-_]verify[-_]([0-9a-f]{11})[-_][0-9a-f]{8}")


def new_name(now_ms: int) -> str:
    """A unique name for a run."""
    return f"{PREFIX}{now_ms:011x}-{secrets.token_hex(4)}"


def schema_of(name: str) -> str:
    """The run's schema in PostgreSQL."""
    return name.replace("-", "_")


def is_stale(name: str, now_ms: int) -> bool:
    """Whether it is the name of a run that can no longer be in progress."""
    found = _NAME.fullmatch(name)
    return found is not None and int(found[1], 16) < now_ms - OLD_MS


#: Queues of a run. None is the default queue, so that their keys have a hash tag on every kind of Redis.
MAIN: Final = "acceptance"
CRASH: Final = "acceptance-crash"
PAUSE: Final = "acceptance-pause"
FENCE: Final = "acceptance-fence"
BACKLOG: Final = "acceptance-backlog"
QUEUES: Final = (MAIN, CRASH, PAUSE, FENCE, BACKLOG)

#: Short, because criteria wait for leases to expire; a running worker renews it four times in that time.
LEASE_S: Final = 2.0
#: What could not be removed expires after this.
_EXPIRES_S: Final = 600.0

#: Settings of a run that differ from the deployment: short leases, no webhooks, no outbox, no published events.
_OVERRIDES: Final[dict[str, Any]] = {
    "visibility_timeout_s": LEASE_S,
    "heartbeat_interval_s": LEASE_S / 4,
    "reclaim": True,
    "reclaim_interval_s": 0.2,
    "reclaim_idle_s": 0.0,
    "max_deliveries": 5,
    "finished_ttl_s": _EXPIRES_S,
    "idempotency_window_s": _EXPIRES_S,
    "feed_limit": 100_000,
    "projector": True,
    # The criteria call the reconciler themselves.
    "reconcile_interval_s": 0.0,
    "durable_timeout_s": 10.0,
    "drain_grace_s": 5.0,
    "concurrency": 20,
    "backlog_alert": None,
    "retention_days": 30.0,
    "token": None,
    "webhook_secret": None,
    "webhooks": (),
    "outbox_url": None,
    "outbox_relay": False,
    "publish_events": None,
    "tracing": False,
}


class Sandbox:
    """The sandbox of one run. Call `remove` however far `create` got."""

    def __init__(self, deployment: Settings) -> None:
        self.name = new_name(_now_ms())
        self.deployment = deployment
        #: Settings of the run; the ledger is None if there is none or it cannot be created.
        self.settings = deployment
        self.redis: RedisSandbox | None = None
        self.postgres: PostgresSandbox | None = None
        #: Why there is no ledger although the deployment has one.
        self.no_ledger = ""
        #: Leftovers of killed runs that were removed.
        self.notes: list[str] = []
        #: What this run could not remove, and when it will be removed.
        self.left: list[str] = []
        #: Whether the run may have written to the store.
        self._in_redis = self._in_postgres = False
        self._folders: set[Path] = set()

    async def remove(self) -> None:
        """Remove everything of the run. What could not be removed is listed in `left`."""
        # Concurrently: each server may have to time out.
        await asyncio.gather(
            self._try_remove("Redis", self._remove_redis()),
            self._try_remove("PostgreSQL", self._remove_postgres()),
        )
        for folder in self._folders:
            _remove_files(folder, self.name)

    async def _try_remove(self, store: str, removal: Awaitable[None]) -> None:
        try:
            await removal
        except HoldfastError as exc:
            self.left.append(
                f"could not remove the data of {self.name} in {store}: {exc}; "
                "a run that starts in an hour or later removes it"
            )

    # Create ----------------------------------------------------------------------------------------

    async def create(self) -> None:
        """Create the sandbox, after removing those of killed runs.

        Raises `EngineUnavailable` or `LedgerUnavailable` if a server does not answer, `MissingExtra` for a store whose
        driver is not installed.
        """
        _check_extras(self.deployment)
        given = {**_values(self.deployment), **_OVERRIDES, "namespace": self.name, "ledger": None}
        if self.deployment.url.startswith("sqlite:"):
            given["url"] = self._file(self.deployment.url, "engine")
        self.settings = Settings(**given)
        if not self.deployment.url.startswith("sqlite:"):
            await self._create_redis()
        ledger = None if self.deployment.embedded else self.deployment.ledger
        if ledger is None:
            return
        if ledger.startswith("sqlite:"):
            given["ledger"] = self._file(ledger, "ledger")
        else:
            given["ledger"] = await self._create_postgres(ledger)
        self.settings = Settings(**given)

    async def _create_redis(self) -> None:
        from holdfast.verification.acceptance.sandbox_redis import RedisSandbox

        self.redis = sandbox = RedisSandbox(self.settings, self.name)
        now_ms = _now_ms()
        for name in await sandbox.stale_runs(now_ms):
            await sandbox.remove(name, list(QUEUES))
            self.notes.append(f"removed the keys of the killed run {name} in Redis")
        self._in_redis = True
        await sandbox.register(now_ms)

    async def _create_postgres(self, url: str) -> str | None:
        from holdfast.ledger.postgres.store import StoreOptions
        from holdfast.verification.acceptance.sandbox_postgres import PostgresSandbox

        timeouts = (self.settings.connect_timeout_s, self.settings.reply_timeout_s)
        self.postgres = sandbox = PostgresSandbox(url, StoreOptions(1, *timeouts))
        self.no_ledger = await sandbox.missing_permission()
        if self.no_ledger:
            return None
        for schema in await sandbox.stale_schemas(_now_ms()):
            await sandbox.remove(schema)
            self.notes.append(f"removed the schema {schema} of a killed run")
        self._in_postgres = True
        return await sandbox.make(self.name)

    def _file(self, url: str, what: str) -> str:
        """URL of a new file next to the deployment's: on the same disk, with the same rights."""
        path = sqlite_path(url)
        folder = Path(tempfile.gettempdir()) if path == ":memory:" else Path(path).resolve().parent
        if not folder.is_dir():
            raise InvalidOption(f"folder {folder} of the {what}'s file does not exist; create it, or correct the URL")
        self._folders.add(folder)
        for old in {found.name.partition(".")[0] for found in folder.glob(f"{PREFIX}*")}:
            if is_stale(old, _now_ms()):
                _remove_files(folder, old)
                self.notes.append(f"removed the files {old}* of a killed run in {folder}")
        return f"sqlite:///{quote(str(folder / f'{self.name}.{what}.db'))}"

    # Remove ----------------------------------------------------------------------------------------

    async def _remove_redis(self) -> None:
        sandbox, self.redis = self.redis, None
        if sandbox is None:
            return
        try:
            if self._in_redis and not await sandbox.remove(self.name, list(QUEUES)):
                self.left.append(
                    f"Redis has too many keys to scan; remaining keys of {self.name} expire within "
                    f"{_EXPIRES_S / 60:g} minutes"
                )
        finally:
            sandbox.close()

    async def _remove_postgres(self) -> None:
        sandbox, self.postgres = self.postgres, None
        if sandbox is None:
            return
        try:
            if self._in_postgres:
                await sandbox.remove(schema_of(self.name))
        finally:
            await sandbox.close()


def _check_extras(deployment: Settings) -> None:
    # Before anything is written to either store.
    modules = [] if deployment.url.startswith("sqlite:") else ["hiredis"]
    if deployment.ledger is not None and not deployment.ledger.startswith("sqlite:"):
        modules += ["alembic", "asyncpg"]
    require("verifying this deployment", *modules)


def _values(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.model_fields}


def _remove_files(folder: Path, name: str) -> None:
    for file in folder.glob(f"{name}.*"):
        file.unlink(missing_ok=True)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
