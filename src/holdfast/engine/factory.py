"""From a URL to an engine; the only place that knows which adapters there are."""

from __future__ import annotations

from urllib.parse import unquote, urlsplit

from holdfast.clock import Clock
from holdfast.engine.port import Engine
from holdfast.errors import InvalidOption
from holdfast.extras import require_drivers
from holdfast.settings import TEMPORARY, Settings


def build_engine(settings: Settings, clock: Clock | None = None) -> Engine:
    """The engine that `settings.url` names, not opened yet. On Redis time is the server's, and `clock` unused.

    `sqlite:///jobs.db` is relative to the working directory, `sqlite:////var/lib/jobs.db` absolute; `sqlite://` and
    `sqlite:///:memory:` are a temporary database of this engine alone. Raises `MissingExtra` without its driver.
    """
    # Imported here: who runs on one store need not have the other's driver.
    if urlsplit(settings.url).scheme == "sqlite":
        from holdfast.engine.sqlite.engine import SqliteEngine

        return SqliteEngine(sqlite_path(settings.url), settings.engine_options(), clock, bool(settings.stream_dlq))
    require_drivers(settings.url)
    from holdfast.engine.redis.engine import RedisEngine

    return RedisEngine.from_settings(settings)


def sqlite_path(url: str) -> str:
    """The path in a `sqlite:` URL; `:memory:` for a temporary database."""
    parts = urlsplit(url)
    if parts.netloc:
        raise InvalidOption(f"{url}: a path needs three slashes (sqlite:///jobs.db), or four if it is absolute")
    if parts.query or parts.fragment:
        raise InvalidOption(f"{url}: a sqlite URL takes no options, only a path")
    return ":memory:" if unquote(parts.path) in TEMPORARY else unquote(parts.path[1:])
