"""Steps (requirement E4): checkpoints inside a job, and sleep that outlives the process.

A step is known by its position, in the order in which the task's own code takes them. On a retry a recorded one returns
its result and does not run again. If the code has changed so that another step stands at a recorded position, nobody
can say what the results belong to: the job is suspended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import msgspec

from holdfast.core.codec import encode_json
from holdfast.core.retry import Duration, duration_ms
from holdfast.effects.calls import call, decode_as, inside, must_be_outside
from holdfast.effects.tools import Scope
from holdfast.errors import InvalidOption, StepMismatch
from holdfast.ledger.port import JobKey, Step
from holdfast.ledger.text import clean

_NAME_LIMIT: Final = 200
#: The name of the step that a sleep is.
_SLEEP: Final = "holdfast.sleep"
#: What is left of a sleep is simply waited for if it is shorter than this: giving the job back costs more.
_SHORT_MS: Final = 1_000


class Asleep(BaseException):
    """Ends the attempt until the job is due again. Not an `Exception`, so that a task's own handlers let it pass."""

    def __init__(self, delay_ms: int) -> None:
        super().__init__(f"asleep for {timedelta(milliseconds=delay_ms)}")
        self.delay_ms = delay_ms


class Steps:
    """The steps of one run."""

    def __init__(self, scope: Scope) -> None:
        claim = scope.claim
        self._scope = scope
        self._tools = scope.tools
        self._job = JobKey(claim.tenant_id, claim.queue, claim.job_id)
        self._attempt = claim.attempt
        self._taken = 0
        self._loading: asyncio.Future[dict[int, Step]] | None = None

    async def step(self, name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The recorded result, or what the function returns now, recorded."""
        must_be_outside("ctx.step")
        position, recorded = await self._next(_checked(name))
        if recorded is not None:
            return decode_as(function, recorded.result)
        self._scope.check(f"the step {name!r}")
        with inside("step"):
            value = await call(function, args, kwargs)
        return decode_as(function, (await self.record(position, name, value)).result)

    async def sleep(self, duration: Duration) -> None:
        """Returns once it is time. Until then the job is given back, and no worker is taken up by it."""
        must_be_outside("ctx.sleep")
        pause_ms = duration_ms(duration, "the time to sleep")
        position, step = await self._next(_SLEEP)
        now_ms = self._tools.now_ms()
        if step is None:
            step = await self.record(position, _SLEEP, now_ms + pause_ms)
        left_ms = msgspec.json.decode(step.result, type=int) - now_ms
        if left_ms > 0:
            await self.rest(left_ms)

    async def rest(self, left_ms: int) -> None:
        """Wait for what is left of a sleep, or end the attempt until then."""
        if left_ms >= _SHORT_MS:
            raise Asleep(left_ms)
        await asyncio.sleep(left_ms / 1000)

    # Also for a thread, which runs the function itself --------------------------------------------------

    async def find(self, name: str) -> tuple[int, Step | None]:
        """The next position, and what is recorded there."""
        return await self._next(_checked(name))

    async def record(self, position: int, name: str, value: Any) -> Step:
        """The step as it is recorded now: the first one to record a position wins. `InvalidPayload` if no JSON."""
        result = encode_json(value, f"the result of step {name!r}", self._tools.payload_limit)
        desk = await self._tools.desk()
        step = await desk.record(
            Step(key=self._job, position=position, name=name, result=result, attempt=self._attempt)
        )
        self._check(step, name)
        return step

    async def _next(self, name: str) -> tuple[int, Step | None]:
        self._scope.check(f"the step {name!r}")
        # Counted before anything is awaited: the order of the calls is the order of the steps.
        self._taken += 1
        position = self._taken
        step = (await self._recorded()).get(position)
        if step is not None:
            self._check(step, name)
        return position, step

    async def _recorded(self) -> dict[int, Step]:
        """Read once in a run, when the first step is taken."""
        if self._loading is None or (self._loading.done() and self._failed(self._loading)):
            self._loading = asyncio.ensure_future(self._load())
        return await asyncio.shield(self._loading)

    async def _load(self) -> dict[int, Step]:
        desk = await self._tools.desk()
        return {step.position: step for step in await desk.steps(self._job)}

    @staticmethod
    def _failed(loading: asyncio.Future[dict[int, Step]]) -> bool:
        return loading.cancelled() or loading.exception() is not None

    def _check(self, step: Step, name: str) -> None:
        if step.name != clean(name):
            raise StepMismatch(
                f"step {step.position} of job {self._job.job_id} was recorded as {step.name!r}, and the code now takes "
                f"{name!r} there; bring the old order of steps back and resume the job, or cancel it and submit it anew"
            )


def _checked(name: object) -> str:
    if not isinstance(name, str) or not name or len(name) > _NAME_LIMIT:
        raise InvalidOption(f"a step's name must be a text of 1 to {_NAME_LIMIT} characters, got {name!r}")
    return name
