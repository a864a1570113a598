"""Options of effects, and the names, fingerprints, calls and results of the functions passed to them.

Effects, steps and transactions share it; `effects.effect` describes how an effect is reserved and recorded.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import hashlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from holdfast.core.codec import canonical_json, decode_json, result_decoder
from holdfast.core.retry import Duration, duration_ms
from holdfast.core.text import clean
from holdfast.errors import InvalidOption, UsageError

#: What the running code is part of: "step", "effect" or "transaction"; None: the task itself.
_inside: ContextVar[str | None] = ContextVar("holdfast_inside", default=None)


def function_name(function: Callable[..., Any]) -> str:
    """The name that a key is bound to: qualified, without the module.

    The module differs when a file is run as a script.
    """
    plain = _plain(function)
    return str(getattr(plain, "__qualname__", None) or type(plain).__qualname__)


def arguments_fingerprint(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Hash of the arguments as sorted JSON.

    An argument that is not JSON (a client, a session) is represented by its type.
    """
    bound: list[Any] = [*args]
    named: dict[str, Any] = dict(kwargs)
    while isinstance(function, functools.partial):
        bound = [*function.args, *bound]
        named = {**function.keywords, **named}
        function = function.func
    return hashlib.sha256(canonical_json([bound, named])).hexdigest()


def decode_result(function: Callable[..., Any], value: bytes) -> Any:
    """Decode a recorded result by the function's return annotation; plain values if it does not fit."""
    try:
        return _decoder(_plain(function)).decode(value)
    except (msgspec.DecodeError, ValueError, TypeError):
        return decode_json(value, f"the recorded result of {function_name(function)}")


async def call_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    late: Callable[[Any], None] | None = None,
) -> Any:
    """Call the function: `async` on this loop, anything else in a thread.

    A thread continues when its caller is cancelled; `late` is then called with its result.
    """
    if _is_async(function):
        return await function(*args, **kwargs)
    value = await _in_thread(functools.partial(function, *args, **kwargs), late)
    # For example an `async` function inside a lambda.
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any], late: Callable[[Any], None] | None) -> Any:
    """Run `work` in a daemon thread: if it never returns, it does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            value = context.run(work)
        except BaseException as exc:  # noqa: BLE001 - raised where it is awaited
            notify(fail, exc)
        else:
            notify(succeed, value)

    def succeed(value: Any) -> None:
        if not future.done():
            future.set_result(value)
        elif late is not None:
            late(value)

    def fail(error: BaseException) -> None:
        if not future.done():
            # A future cannot carry a StopIteration.
            future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    def notify(callback: Callable[[Any], None], argument: Any) -> None:
        try:
            loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            # The loop is closed, and with it the waiting caller.
            return

    threading.Thread(target=run, name="holdfast-effect", daemon=True).start()
    try:
        return await future
    except asyncio.CancelledError:
        # Cancelled just as it ended: the future has a result that would otherwise be lost.
        if late is not None and not future.cancelled() and future.done() and future.exception() is None:
            late(future.result())
        raise


@contextmanager
def inside_step(what: str) -> Iterator[None]:
    """Mark the code of the block as part of a step, an effect or a transaction."""
    token = _inside.set(what)
    try:
        yield
    finally:
        # A coroutine that is closed from outside ends in another context, where the variable is unchanged.
        with suppress(ValueError):
            _inside.reset(token)


def require_outside(what: str) -> None:
    """Raise `UsageError` inside a step, an effect or a transaction.

    Steps are numbered in the order of the task's code, so nesting would shift the numbers.
    """
    if (outer := _inside.get()) is not None:
        raise UsageError(f"{what} was called inside the function of a ctx.{outer}; call it from the task itself")


def _plain(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__func__", function)


def _is_async(function: Callable[..., Any]) -> bool:
    plain = _plain(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


_CACHE_SIZE: Final = 1_024


@functools.lru_cache(maxsize=_CACHE_SIZE)
def _decoder(function: Any) -> msgspec.json.Decoder[Any]:
    """Cached per function: building a decoder takes longer than using it."""
    return result_decoder(function)


T = TypeVar("T")

#: In bytes of UTF-8: a key has to fit into an index.
_KEY_LIMIT: Final = 1_000
_REASON_LIMIT: Final = 500


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """A check's answer: the effect has happened, and this is its result."""

    value: T


@dataclass(frozen=True, slots=True)
class NotDone:
    """A check's answer: the effect has not happened and will not; run it again."""


Check = Callable[[str], Awaitable[Done[Any] | NotDone]]
InDoubt = Literal["suspend", "run_again"] | Check


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectOptions:
    """Options of an effect."""

    in_doubt: InDoubt = "suspend"
    not_done: tuple[type[BaseException], ...] = ()
    ttl_ms: int | None = None


def make_options(in_doubt: object, not_done: object, ttl: Duration | None) -> EffectOptions:
    """Check and collect options; raises `InvalidOption`."""
    if in_doubt not in ("suspend", "run_again") and not callable(in_doubt):
        raise InvalidOption(f"in_doubt must be 'suspend', 'run_again' or an async function, not {in_doubt!r}")
    types = not_done if isinstance(not_done, tuple) else (not_done,)
    for item in types:
        if not (isinstance(item, type) and issubclass(item, BaseException)):
            raise InvalidOption(f"not_done takes an exception type or a tuple of them, not {item!r}")
    ttl_ms = None if ttl is None else duration_ms(ttl, "ttl")
    if ttl_ms == 0:
        raise InvalidOption("ttl must be more than 0; omit it to keep the key forever")
    return EffectOptions(in_doubt=in_doubt, not_done=types, ttl_ms=ttl_ms)


def check_key(key: object) -> str:
    """Check a key: a non-empty string that can be stored and is not too long."""
    if not isinstance(key, str) or not key:
        raise InvalidOption(f"an effect's key must be a non-empty string, got {key!r}")
    if clean(key) != key:
        raise InvalidOption(f"an effect's key {key!r} must not contain zero bytes or lone surrogates")
    if (size := len(key.encode())) > _KEY_LIMIT:
        raise InvalidOption(f"an effect's key has {size} bytes of UTF-8, the limit is {_KEY_LIMIT}")
    return key
