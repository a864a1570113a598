"""The extras of holdfast: their modules, and the error for a module that is not installed.

The base install runs on SQLite. Every other store, the HTTP service and every broker needs an extra, and its packages
are imported only where they are used, after a call of `require`, which reports a missing package with the command that
installs it. `make check` fails if a base module imports one of these packages at import time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Final

from holdfast.errors import MissingExtra

#: Extra → modules that holdfast imports from its packages.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "http": ("fastapi", "httpcore", "httpx", "starlette", "uvicorn"),
    "kafka": ("confluent_kafka",),
    "mongo": ("pymongo.asynchronous",),
    "postgres": ("alembic", "asyncpg"),
    "rabbitmq": ("aio_pika", "aiormq", "pamqp", "yarl"),
    "redis": ("hiredis", "redis", "uvloop"),
    "sqs": ("aiobotocore", "botocore"),
    "tracing": ("opentelemetry.exporter.otlp.proto.http", "opentelemetry.sdk", "opentelemetry.trace"),
}
_EXTRA_OF: Final = {module: extra for extra, modules in EXTRAS.items() for module in modules}
#: Module of a store's driver, by the first word of the URL's scheme.
_DRIVERS: Final = {"redis": "hiredis", "rediss": "hiredis", "postgresql": "asyncpg", "postgres": "asyncpg"}


def require(what: str, *modules: str) -> None:
    """Raise `MissingExtra` unless all of these modules of `EXTRAS` are installed. Imports none of them."""
    error = missing(what, *modules)
    if error is not None:
        raise error


def missing(what: str, *modules: str) -> MissingExtra | None:
    """Return the error of `require`, or None; for modules that raise it among their imports."""
    absent = tuple(module for module in modules if not _is_installed(module))
    extras = sorted({_EXTRA_OF[module] for module in absent})
    return MissingExtra(what, absent, tuple(extras)) if absent else None


def require_drivers(*urls: str | None) -> None:
    """Raise `MissingExtra` unless the drivers of the stores that the URLs name are installed."""
    schemes = dict.fromkeys(url.partition("://")[0] for url in urls if url is not None)
    drivers = {scheme: _DRIVERS[kind] for scheme in schemes if (kind := scheme.partition("+")[0]) in _DRIVERS}
    needing = [f"{scheme}://" for scheme, driver in drivers.items() if not _is_installed(driver)]
    require(" and ".join(needing), *dict.fromkeys(drivers.values()))


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """For `asyncio.Runner`: uvloop if it is installed, otherwise asyncio's own loop."""
    if not _is_installed("uvloop"):
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory


def _is_installed(module: str) -> bool:
    return _is_found(module.partition(".")[0]) and _is_found(module)


def _is_found(module: str) -> bool:
    if module in sys.modules:
        # For an entry that is None, import raises ModuleNotFoundError.
        return sys.modules[module] is not None
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # A parent package is missing.
        return False
