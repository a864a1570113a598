"""Clean-up in a forked child process, which inherits locks, event loops and connections.

Objects that own these have an `after_fork`, which is called in the child before any other code runs there. It
replaces locks, which a thread of the parent may have held, and drops the parent's connections without closing them.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import signal
import socket
from typing import Any, Final, Protocol, cast
from weakref import WeakSet

from holdfast.errors import UsageError


class Forkable(Protocol):
    """An object that may be created before a fork and used after it."""

    def after_fork(self) -> None:
        """Called in the child. Must not block or touch what belongs to the parent."""
        ...


class _SelectorLoop(Protocol):
    """The parts of asyncio's own event loop that a fork shares with the parent."""

    _selector: selectors.BaseSelector
    _ssock: socket.socket
    _csock: socket.socket

    def _make_self_pipe(self) -> None: ...


_members: Final[WeakSet[Any]] = WeakSet()
#: Objects of the parent, kept forever so that no finalizer closes them here.
_parents: Final[list[object]] = []
#: The event loop that ran in the thread that forked; None in a process that was not forked inside one.
_inherited: asyncio.AbstractEventLoop | None = None


def on_fork(member: Forkable) -> None:
    """Call `member.after_fork` in every child process, as long as `member` exists."""
    _members.add(member)


def leave_to_parent(thing: object) -> None:
    """Keep an object of the parent from being closed or collected in this process."""
    _parents.append(thing)


def is_inside_parents_loop() -> bool:
    """Whether the caller is inside a coroutine that the parent started and the fork copied."""
    if _inherited is None:
        return False
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        # asyncio does not count the inherited loop as running. After that loop has ended, no coroutine can call this.
        return _inherited.is_running()
    return False


def running_loop() -> asyncio.AbstractEventLoop:
    """The running event loop; raises `UsageError` in a coroutine that was copied by a fork."""
    if is_inside_parents_loop():
        raise UsageError(
            "this process was forked inside a running event loop, which belongs to its parent; "
            "fork before the loop starts, or use multiprocessing's spawn method, and open the app in the child"
        )
    return asyncio.get_running_loop()


def _before_fork() -> None:
    global _inherited
    try:
        _inherited = asyncio.get_running_loop()
    except RuntimeError:
        _inherited = None


def _after_fork_in_parent() -> None:
    global _inherited
    _inherited = None


def _after_fork_in_child() -> None:
    members = list(_members)
    if not members:
        return
    for member in members:
        member.after_fork()
    if isinstance(_inherited, asyncio.SelectorEventLoop):
        _separate(cast(_SelectorLoop, _inherited))
    # As Python 3.12 does by itself: the parent's event loop would handle signals to this process.
    signal.set_wakeup_fd(-1)


def _separate(loop: _SelectorLoop) -> None:
    """Give an inherited event loop its own epoll instance and wake-up pipe.

    It shares both with the parent. A child closes its loop when it ends, which would remove the pipe from the parent's
    epoll instance: results from other threads (on SQLite, all results) would no longer wake the parent.
    """
    _parents.append((loop._selector, loop._ssock, loop._csock))
    loop._selector = selectors.DefaultSelector()
    loop._make_self_pipe()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
