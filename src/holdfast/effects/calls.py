"""The functions that tasks hand to effects, steps and transactions: their names, their results, how they are run."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from holdfast.core.codec import decode_json, fingerprint_json, result_decoder
from holdfast.errors import UsageError

#: What the code that runs now is part of: "step", "effect", "transaction".
_inside: ContextVar[str | None] = ContextVar("holdfast_inside", default=None)


def name_of(function: Callable[..., Any]) -> str:
    """What a key is bound to: the qualified name, without the module (which differs when a file is run as a script)."""
    plain = _plain(function)
    return str(getattr(plain, "__qualname__", None) or type(plain).__qualname__)


def fingerprint(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A hash of the arguments as JSON, keys sorted. One that is no JSON (a client, a session) counts by its type."""
    bound: list[Any] = [*args]
    named: dict[str, Any] = dict(kwargs)
    while isinstance(function, functools.partial):
        bound = [*function.args, *bound]
        named = {**function.keywords, **named}
        function = function.func
    return hashlib.sha256(fingerprint_json([bound, named])).hexdigest()


def decode_as(function: Callable[..., Any], value: bytes) -> Any:
    """A recorded result as the function's return annotation has it; as plain values if that does not fit."""
    try:
        return _decoder(_plain(function)).decode(value)
    except (msgspec.DecodeError, ValueError, TypeError):
        return decode_json(value, f"the recorded result of {name_of(function)}")


async def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    late: Callable[[Any], None] | None = None,
) -> Any:
    """Run it: `async` on this loop, anything else in a thread.

    A thread goes on when its caller is cancelled; `late` is then told what it returned.
    """
    if _is_async(function):
        return await function(*args, **kwargs)
    value = await _in_thread(functools.partial(function, *args, **kwargs), late)
    # An `async` function inside a lambda, say.
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any], late: Callable[[Any], None] | None) -> Any:
    """A daemon thread, so that a function that never returns cannot keep a drained worker alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            value = context.run(work)
        except BaseException as exc:  # noqa: BLE001 - raised where it is awaited
            tell(fail, exc)
        else:
            tell(succeed, value)

    def succeed(value: Any) -> None:
        if not future.done():
            future.set_result(value)
        elif late is not None:
            late(value)

    def fail(error: BaseException) -> None:
        if not future.done():
            # A future cannot hold a StopIteration.
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def tell(how: Callable[[Any], None], what: Any) -> None:
        try:
            loop.call_soon_threadsafe(how, what)
        except RuntimeError:
            # The loop is gone, and with it whoever waited.
            return

    threading.Thread(target=run, name="holdfast-effect", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        # Cancelled in the very moment in which it ended: the future has a result that nobody will fetch.
        if late is not None and not future.cancelled() and future.done() and future.exception() is None:
            late(future.result())
        raise


@contextmanager
def inside(what: str) -> Iterator[None]:
    """The code of the block is part of a step, an effect or a transaction."""
    token = _inside.set(what)
    try:
        yield
    finally:
        # A coroutine that is closed from outside ends in another context, where the variable is as it was.
        with suppress(ValueError):
            _inside.reset(token)


def must_be_outside(what: str) -> None:
    """Steps are numbered in the order of the task's own code: one inside another would come and go with it."""
    if (outer := _inside.get()) is not None:
        raise UsageError(f"{what} was called inside the function of a ctx.{outer}; call it from the task itself")


def _plain(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _is_async(function: Callable[..., Any]) -> bool:
    plain = _plain(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


_KEPT: Final = 1_024


@functools.lru_cache(maxsize=_KEPT)
def _decoder(function: Any) -> msgspec.json.Decoder[Any]:
    """Kept by function: making one takes longer than using it."""
    return result_decoder(function)
