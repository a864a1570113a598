"""An app's settings and connections, and how they are changed: permanently, or for a block.

`Configurable` is the base of `Backend`. `Reconfigured` is what `app.configure(…)` returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from holdfast.aio import BlockingPortal
from holdfast.client.connections import LoopConnections
from holdfast.client.submitter import Submitter
from holdfast.clock import Clock
from holdfast.errors import InvalidOption
from holdfast.extras import require, require_drivers
from holdfast.settings import OUTSIDE, Settings, is_in_memory


class Setup(NamedTuple):
    """An app's settings, clock and connections."""

    #: Settings given in code, without those of the environment, which is read again at every change.
    given: Mapping[str, Any]
    settings: Settings
    clock: Clock
    connections: LoopConnections


class Configurable(ABC):
    """The part of a backend that manages its settings."""

    def __init__(self, given: Mapping[str, Any], settings: Settings, clock: Clock) -> None:
        self.portal = BlockingPortal()
        _check_extras(settings)
        self._use(Setup(given, settings, clock, self._make_connections(settings)))

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _make_connections(self, settings: Settings) -> LoopConnections: ...

    @abstractmethod
    def _settings_changed(self) -> None: ...

    def configure(self, overrides: Mapping[str, Any], clock: Clock | None = None) -> Callable[[bool], None]:
        """Change settings or the clock; return the function that restores the former ones.

        Its argument is False if another exception is being raised, which an error of the restore would hide. Raises
        `InvalidOption` while the app is open.
        """
        if self.connections.in_use:
            raise InvalidOption("this app is open; change settings before it is opened, or after `await app.close()`")
        if self.settings.isolated:
            # Connections of closed event loops.
            self.connections.discard()
        former = self._setup
        self._change(overrides, clock)
        return lambda sound: self._undo(former, sound=sound)

    @contextmanager
    def run_inline(self, submitter: Submitter) -> Iterator[None]:
        """Send jobs to this submitter during the block, and use a store in memory for everything else.

        The app may be open: its connections are kept, and used again after the block.
        """
        former = self._setup
        self._change({"url": "sqlite://"})
        self.connections.inline_submitter = submitter
        try:
            yield
        finally:
            self.connections.discard()
            self._use(former)

    def _change(self, overrides: Mapping[str, Any], clock: Clock | None = None) -> None:
        former = self._setup
        given = _merge(former.given, overrides)
        settings = Settings.exactly(given)
        _check_extras(settings)
        connections = self._make_connections(settings)
        connections.inline_submitter = former.connections.inline_submitter
        self._use(Setup(given, settings, clock or former.clock, connections))

    def _undo(self, former: Setup, *, sound: bool) -> None:
        """Restore the former settings.

        `sound`: no other exception is being raised, which an error here would hide.
        """
        connections = self.connections
        try:
            self.portal.close(connections.close)
            if self.settings.isolated:
                connections.discard()
        finally:
            self._use(former)
        if connections.in_use and sound:
            raise InvalidOption("this app is still open; use `async with app.configure(…)`, or close it in the block")

    def _use(self, setup: Setup) -> None:
        self._setup = setup
        self.settings = setup.settings
        self.clock = setup.clock
        self.connections = setup.connections
        self._settings_changed()


class Closable(Protocol):
    """The part of an app that a block of `configure` uses."""

    async def close(self) -> None: ...


A = TypeVar("A", bound=Closable)


class Reconfigured(Generic[A]):
    """A change made by `app.configure(…)`. Used as a block, it is undone at the block's end.

    `async with` closes the app first. `with` closes what can be closed without an event loop: stores in memory, and the
    connections of `submit_sync`.
    """

    def __init__(self, app: A, undo: Callable[[bool], None]) -> None:
        self._app = app
        self._undo = undo

    def __enter__(self) -> A:
        return self._app

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._undo(error is None)

    async def __aenter__(self) -> A:
        return self._app

    async def __aexit__(self, error: type[BaseException] | None, *_: object) -> None:
        closed = False
        try:
            await self._app.close()
            closed = True
        finally:
            self._undo(closed and error is None)


def _check_extras(settings: Settings) -> None:
    """Raise `MissingExtra` for a store without its driver, and for tracing without its packages."""
    require_drivers(settings.url, settings.ledger, settings.outbox_url)
    if settings.tracing:
        require("tracing", "opentelemetry.trace")


def _merge(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The settings given in code, after a change.

    A move into memory drops the stores named for another engine.
    """
    url = overrides.get("url")
    moved = isinstance(url, str) and is_in_memory(url)
    return {name: value for name, value in given.items() if not (moved and name in OUTSIDE)} | dict(overrides)
