"""Submit the jobs of a chaos run at a bounded rate: by library, singly and in bulk, and by HTTP.

`LoadGenerator` continues through every fault. A submission without a clear answer is in doubt; it is submitted again
under the same key, alternating between library and HTTP, until it is accepted or refused.

`SubmissionJournal` is a file with everything known for certain: accepted, in doubt, refused, and what operators did.
Each entry is written in one call before the generator continues. It is the only record not made by holdfast; checks
compare the ledger with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx
import msgspec

from holdfast.app import Holdfast
from holdfast.client.options import SubmitOptions
from holdfast.core.job import Envelope
from holdfast.core.retry import Backoff
from holdfast.errors import HoldfastError, IntakeRefused, NotDurableYet, Unavailable, UsageError
from holdfast.verification.chaos import workload
from holdfast.verification.chaos.workload import WorkItem, probe, work_item

#: A receipt was seen.
ACCEPTED: Final = "accepted"
#: No answer, or one that leaves it open: submitted again, under the same key, until it is known.
IN_DOUBT: Final = "in doubt"
#: Never to be accepted.
REFUSED: Final = "refused"
#: A person's cancellation was confirmed.
CANCELLED: Final = "cancelled"
#: A person had a job that waited for its time run at once.
EXPEDITED: Final = "expedited"
#: A person had a dead letter run again, as another job.
REPLAYED: Final = "replayed"
#: A person said of an effect in doubt whether it was done.
RESOLVED: Final = "resolved"


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal."""

    said: str
    number: int
    job_id: str = ""
    #: Why, or through which way.
    note: str = ""
    #: When, by the clock.
    at: float = 0.0


class SubmissionJournal:
    """Written line by line; what it says is in memory as well."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        #: From which all errands follow.
        self.seed = seed
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        #: The number of an errand → the jobs that receipts for it named. More than one is wrong.
        self.accepted: dict[int, set[str]] = {}
        self.numbers: dict[str, int] = {}
        #: The job → when its first receipt was seen.
        self.accepted_at: dict[str, float] = {}
        self.refused: dict[int, str] = {}
        #: Errands with a receipt, probes left out.
        self.errands = 0
        #: Submissions that had no clear answer, however they ended.
        self.doubts = 0
        #: All that were seen: an errand that is submitted twice, or again after a doubt, has several.
        self.receipts = 0
        self.cancelled: set[str] = set()
        #: The dead letter's job → the job that it was replayed as.
        self.replayed: dict[str, str] = {}
        self.resolved: dict[str, str] = {}

    def write(self, said: str, number: int, job_id: str = "", note: str = "") -> None:
        """One write of one line: whole, whatever happens to this process after it."""
        at = time.time()
        os.write(self._file, msgspec.json.encode(JournalEntry(said, number, job_id, note, at)) + b"\n")
        if said == ACCEPTED:
            self.receipts += 1
            self.errands += number >= 0 and number not in self.accepted
            self.accepted.setdefault(number, set()).add(job_id)
            self.numbers[job_id] = number
            self.accepted_at.setdefault(job_id, at)
        elif said == IN_DOUBT:
            self.doubts += 1
        elif said == REFUSED:
            self.refused[number] = note
        elif said == CANCELLED:
            self.cancelled.add(job_id)
        elif said == REPLAYED:
            self.replayed[note] = job_id
        elif said == RESOLVED:
            self.resolved[job_id] = note

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


#: The most that go out together.
_BULK: Final = 40
#: How often the submitter looks at its clock.
_TICK_S: Final = 0.05
_HTTP_TIMEOUT_S: Final = 15.0
#: Submissions on their way at a time. While a store is down those wait, and nothing new is begun.
_ON_THE_WAY: Final = 500
#: Answers after which the same request may be sent again.
_AGAIN: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """`HOLDFAST_*` variables as arguments for an app."""
    prefix = "HOLDFAST_"
    given = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}
    return {
        name: msgspec.json.decode(value) if value.startswith(("{", "[")) else value for name, value in given.items()
    }


def configured(environment: Mapping[str, str]) -> Holdfast:
    """The app of a chaos run, on these stores."""
    workload.app.configure(**settings_of(environment))
    return workload.app


class ServiceClient:
    """The HTTP service as its callers see it."""

    def __init__(self, url: str, token: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            # Whoever waits for a connection has sent nothing yet, and is not in doubt about it.
            timeout=httpx.Timeout(_HTTP_TIMEOUT_S, pool=None),
            trust_env=False,
            limits=httpx.Limits(max_connections=50, max_keepalive_connections=20),
        )

    async def call(self, method: str, path: str, **request: Any) -> Any:
        """The answer's document. `Unavailable`: nobody knows, try again; `UsageError`: no."""
        try:
            answer = await self._client.request(method, path, **request)
        except httpx.HTTPError as exc:
            raise Unavailable(f"no answer: {exc!r}") from exc
        if answer.status_code in _AGAIN:
            raise Unavailable(f"HTTP {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 400:
            raise SubmissionRefused(answer.status_code, answer.text[:300])
        return answer.json()

    async def close(self) -> None:
        await self._client.aclose()


class SubmissionRefused(UsageError):
    """The service said no."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class LoadGenerator:
    """Hands in `count` errands, and probes."""

    def __init__(
        self, app: Holdfast, web: ServiceClient, journal: SubmissionJournal, *, seed: int, count: int, folder: Path
    ) -> None:
        self._app = app
        self._web = web
        self._journal = journal
        self._seed = seed
        self._count = count
        self._folder = folder
        self._random = Random(f"{seed}:load")
        self._begun = 0
        self._on_the_way: set[asyncio.Task[None]] = set()
        #: Told of every errand that is accepted, with its job's id.
        self.on_accepted: Callable[[WorkItem, str], None] = lambda _, __: None

    @property
    def accepted(self) -> int:
        """Errands with a receipt."""
        return self._journal.errands

    async def run(self, rate: float, allowed: Callable[[], float]) -> None:
        """All errands, so many a second, never more than the share of them that is allowed at the time."""
        credit, last = 0.0, time.monotonic()
        while self._begun < self._count:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            # Time in which nothing could be sent is not made up for: a flood after each fault would be another test.
            credit = min(credit + (now - last) * rate, max(1.0, rate))
            last = now
            room = min(int(allowed() * self._count) - self._begun, _ON_THE_WAY - len(self._on_the_way), int(credit))
            if room > 0:
                credit -= room
                self._begin(room)
        while self._on_the_way:
            await asyncio.wait(self._on_the_way)

    async def probe(self, number: int) -> str:
        """One plain job, accepted; its id. It has its own way in: it must not wait in line behind others here."""
        return await self._until_known(probe(self._seed, number), [self._submit])

    async def close(self) -> None:
        for task in self._on_the_way:
            task.cancel()
        await asyncio.gather(*self._on_the_way, return_exceptions=True)

    def _begin(self, room: int) -> None:
        numbers = range(self._begun, self._begun + room)
        self._begun += room
        errands = [work_item(self._seed, number, self._folder) for number in numbers]
        together = [each for each in errands if each.way == "bulk"]
        for start in range(0, len(together), _BULK):
            self._spawn(self._bulk(together[start : start + _BULK]))
        for each in errands:
            if each.way != "bulk":
                self._spawn(self._one(each))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._on_the_way.add(task)
        task.add_done_callback(self._on_the_way.discard)

    async def _one(self, each: WorkItem) -> None:
        ways = [self._post, self._submit] if each.way == "http" else [self._submit, self._post]
        job_id = await self._until_known(each, ways)
        if job_id and each.twice:
            # The first receipt is in the journal: this one must name the same job.
            await self._until_known(each, ways)

    async def _bulk(self, errands: Sequence[WorkItem]) -> None:
        """One call for all; whoever got no receipt by it goes on alone."""
        send = self._send_bulk if self._random.random() < 0.5 else self._post_bulk
        try:
            for each, job_id in zip(errands, await send(errands), strict=True):
                if job_id:
                    self._accept(each, job_id, "bulk")
        except (HoldfastError, OSError, TimeoutError) as exc:
            for each in errands:
                self._journal.write(IN_DOUBT, each.number, note=_told(exc))
        await asyncio.gather(*(self._one(each) for each in errands if self._is_open(each) or each.twice))

    def _is_open(self, each: WorkItem) -> bool:
        return each.number not in self._journal.accepted

    async def _until_known(self, each: WorkItem, ways: Sequence[Callable[[WorkItem], Awaitable[str]]]) -> str:
        """Submit by each of these ways in turn until it is accepted or refused; the job's id, or nothing."""
        backoff, tries = Backoff(), 0
        while True:
            way = ways[tries % len(ways)]
            tries += 1
            try:
                job_id = await way(each)
            # Accepted but not durable yet is not what was asked for: the same key again, until it is.
            except (Unavailable, IntakeRefused, NotDurableYet, OSError, TimeoutError) as exc:
                self._journal.write(IN_DOUBT, each.number, note=_told(exc))
                await asyncio.sleep(min(1.0, backoff.next_s()))
                continue
            except HoldfastError as exc:
                self._journal.write(REFUSED, each.number, note=_told(exc))
                return ""
            self._accept(each, job_id, way.__name__.lstrip("_"))
            return job_id

    def _accept(self, each: WorkItem, job_id: str, way: str) -> None:
        first = self._is_open(each)
        self._journal.write(ACCEPTED, each.number, job_id, way)
        if first:
            self.on_accepted(each, job_id)

    # Ways in -------------------------------------------------------------------------------------------------

    async def _submit(self, each: WorkItem) -> str:
        receipt = await (await self._app.submitter()).submit(self._envelope(each))
        return receipt.job_id

    async def _send_bulk(self, errands: Sequence[WorkItem]) -> list[str]:
        receipts = await (await self._app.submitter()).submit_many([self._envelope(each) for each in errands])
        return [receipt.job_id for receipt in receipts]

    async def _post(self, each: WorkItem) -> str:
        answer = await self._web.call(
            "POST", "/api/v1/jobs", json=_document(each), headers={"Idempotency-Key": each.key}
        )
        return str(answer["job_id"])

    async def _post_bulk(self, errands: Sequence[WorkItem]) -> list[str]:
        wanted = [_document(each) | {"idempotency_key": each.key} for each in errands]
        answer = await self._web.call("POST", "/api/v1/jobs/bulk", json={"jobs": wanted})
        return [str(result.get("job_id") or "") for result in answer["results"]]

    def _envelope(self, each: WorkItem) -> Envelope:
        options: SubmitOptions = {
            "queue": each.queue,
            "tenant_id": each.tenant_id,
            "idempotency_key": each.key,
            "priority": each.priority,
            "durable": each.durable,
        }
        if each.delay_s:
            options["delay"] = timedelta(seconds=each.delay_s)
        return self._app.envelope(each.task, msgspec.json.encode(each.arguments), **options)


def _document(each: WorkItem) -> dict[str, Any]:
    document: dict[str, Any] = {
        "task": each.task,
        "payload": each.arguments,
        "queue": each.queue,
        "tenant_id": each.tenant_id,
        "priority": each.priority.name.lower(),
        "durable": each.durable,
    }
    return document | {"delay_s": each.delay_s} if each.delay_s else document


def _told(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"[:300]
