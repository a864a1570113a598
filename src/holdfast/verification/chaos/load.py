"""Submit the jobs of a chaos run at a bounded rate: by library, singly and in bulk, and by HTTP.

`LoadGenerator` continues through every fault. A submission without a clear answer is in doubt; it is submitted again
under the same key, alternating between library and HTTP, until it is accepted or refused.

`SubmissionJournal` is a file that records submissions as accepted, in doubt or refused, and what operators did.
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
from holdfast.execution.backend import backend_of
from holdfast.verification.chaos import workload
from holdfast.verification.chaos.workload import PILLS, WorkItem, crash_items, probe, work_item

#: A receipt was returned.
ACCEPTED: Final = "accepted"
#: No clear answer: submitted again with the same key until it is accepted or refused.
IN_DOUBT: Final = "in doubt"
#: Refused permanently.
REFUSED: Final = "refused"
#: An operator's cancellation was confirmed.
CANCELLED: Final = "cancelled"
#: An operator expedited a delayed job.
EXPEDITED: Final = "expedited"
#: An operator replayed a dead letter as a new job.
REPLAYED: Final = "replayed"
#: An operator resolved an effect in doubt.
RESOLVED: Final = "resolved"


class JournalEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of the journal, written as a line of JSON."""

    said: str
    number: int
    job_id: str = ""
    #: The reason, or the way of submission.
    note: str = ""
    #: Wall clock time.
    at: float = 0.0


class SubmissionJournal:
    """The journal file, with its contents in memory."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        #: All work items follow from it.
        self.seed = seed
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        #: Number of a work item → job ids in its receipts. More than one is a defect.
        self.accepted: dict[int, set[str]] = {}
        self.numbers: dict[str, int] = {}
        #: Job id → time of its first receipt.
        self.accepted_at: dict[str, float] = {}
        self.refused: dict[int, str] = {}
        #: Work items with a receipt, without probes.
        self.work_items = 0
        #: Submissions without a clear answer, however they ended.
        self.doubts = 0
        #: All receipts: a work item that is submitted twice, or again after a doubt, has several.
        self.receipts = 0
        self.cancelled: set[str] = set()
        #: Job id of a dead letter → job id of its replay.
        self.replayed: dict[str, str] = {}
        self.resolved: dict[str, str] = {}

    def write(self, kind: str, number: int, job_id: str = "", note: str = "") -> None:
        """Append one entry in a single write, so that it is complete even if this process is killed afterwards."""
        at = time.time()
        os.write(self._file, msgspec.json.encode(JournalEntry(kind, number, job_id, note, at)) + b"\n")
        if kind == ACCEPTED:
            self.receipts += 1
            self.work_items += number >= 0 and number not in self.accepted
            self.accepted.setdefault(number, set()).add(job_id)
            self.numbers[job_id] = number
            self.accepted_at.setdefault(job_id, at)
        elif kind == IN_DOUBT:
            self.doubts += 1
        elif kind == REFUSED:
            self.refused[number] = note
        elif kind == CANCELLED:
            self.cancelled.add(job_id)
        elif kind == REPLAYED:
            self.replayed[note] = job_id
        elif kind == RESOLVED:
            self.resolved[job_id] = note

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


#: Maximum size of a bulk submission.
_BULK: Final = 40
#: Interval at which the generator checks its clock.
_TICK_S: Final = 0.05
_HTTP_TIMEOUT_S: Final = 15.0
#: Maximum number of submissions in flight. While a store is down they wait, and no new ones are begun.
_IN_FLIGHT: Final = 500
#: Status codes after which the same request is repeated.
_RETRYABLE: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


def settings_of(environment: Mapping[str, str]) -> dict[str, Any]:
    """Settings of an app from `HOLDFAST_*` variables."""
    prefix = "HOLDFAST_"
    given = {name.removeprefix(prefix).lower(): value for name, value in environment.items() if name.startswith(prefix)}
    return {
        name: msgspec.json.decode(value) if value.startswith(("{", "[")) else value for name, value in given.items()
    }


def configured(environment: Mapping[str, str]) -> Holdfast:
    """The app of a chaos run on these stores."""
    workload.app.configure(**settings_of(environment))
    return workload.app


class ServiceClient:
    """Client of the HTTP service."""

    def __init__(self, url: str, token: str) -> None:
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"},
            # No timeout for a free connection: nothing was sent yet, so there is no doubt.
            timeout=httpx.Timeout(_HTTP_TIMEOUT_S, pool=None),
            trust_env=False,
            limits=httpx.Limits(max_connections=50, max_keepalive_connections=20),
        )

    async def call(self, method: str, path: str, **request: Any) -> Any:
        """Send a request and return the JSON body. Raises `Unavailable` (retry) or `SubmissionRefused`."""
        try:
            answer = await self._client.request(method, path, **request)
        except httpx.HTTPError as exc:
            raise Unavailable(f"no answer: {exc!r}") from exc
        if answer.status_code in _RETRYABLE:
            raise Unavailable(f"HTTP {answer.status_code}: {answer.text[:300]}")
        if answer.status_code >= 400:
            raise SubmissionRefused(answer.status_code, answer.text[:300])
        return answer.json()

    async def close(self) -> None:
        await self._client.aclose()


class SubmissionRefused(UsageError):
    """The service refused the request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


class LoadGenerator:
    """Submits `count` work items, probes, and jobs that end their workers."""

    def __init__(
        self, app: Holdfast, web: ServiceClient, journal: SubmissionJournal, *, seed: int, count: int, folder: Path
    ) -> None:
        self._backend = backend_of(app)
        self._web = web
        self._journal = journal
        self._seed = seed
        self._count = count
        self._folder = folder
        self._random = Random(f"{seed}:load")
        self._begun = 0
        self._in_flight: set[asyncio.Task[None]] = set()
        #: Called for every accepted work item, with its job id.
        self.on_accepted: Callable[[WorkItem, str], None] = lambda _, __: None

    @property
    def accepted(self) -> int:
        """Work items with a receipt."""
        return self._journal.work_items

    async def run(self, rate: float, allowed: Callable[[], float]) -> None:
        """Submit all work items at `rate` per second, but never more than the currently allowed share of them."""
        credit, last = 0.0, time.monotonic()
        while self._begun < self._count:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            # Lost time is not made up for: a burst after each fault would be a different test.
            credit = min(credit + (now - last) * rate, max(1.0, rate))
            last = now
            count = min(int(allowed() * self._count) - self._begun, _IN_FLIGHT - len(self._in_flight), int(credit))
            if count > 0:
                credit -= count
                self._begin(count)
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    async def probe(self, number: int) -> str:
        """Submit a plain job until it is accepted. Returns its id.

        Not subject to the limit of submissions in flight.
        """
        return await self._wait_until_known(probe(self._seed, number), [self._submit])

    async def crash(self, number: int) -> str:
        """Submit the jobs of a `crash` fault until they are accepted.

        Returns the id of the one that ends its worker; empty if it was refused.
        """
        items = crash_items(self._seed, number, self._folder)
        await self._bulk(items)
        (pill,) = (item.number for item in items if item.task in PILLS)
        return next(iter(self._journal.accepted.get(pill, ())), "")

    async def close(self) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _begin(self, count: int) -> None:
        numbers = range(self._begun, self._begun + count)
        self._begun += count
        items = [work_item(self._seed, number, self._folder) for number in numbers]
        together = [each for each in items if each.way == "bulk"]
        for start in range(0, len(together), _BULK):
            self._spawn(self._bulk(together[start : start + _BULK]))
        for each in items:
            if each.way != "bulk":
                self._spawn(self._one(each))

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _one(self, each: WorkItem) -> None:
        ways = [self._post, self._submit] if each.way == "http" else [self._submit, self._post]
        job_id = await self._wait_until_known(each, ways)
        if job_id and each.twice:
            # The first receipt is in the journal: this one must name the same job.
            await self._wait_until_known(each, ways)

    async def _bulk(self, items: Sequence[WorkItem]) -> None:
        """Submit all in one call; then those without a receipt one by one."""
        send = self._send_bulk if self._random.random() < 0.5 else self._post_bulk
        try:
            for each, job_id in zip(items, await send(items), strict=True):
                if job_id:
                    self._accept(each, job_id, "bulk")
        except (HoldfastError, OSError, TimeoutError) as exc:
            for each in items:
                self._journal.write(IN_DOUBT, each.number, note=_note(exc))
        await asyncio.gather(*(self._one(each) for each in items if self._is_open(each) or each.twice))

    def _is_open(self, each: WorkItem) -> bool:
        return each.number not in self._journal.accepted

    async def _wait_until_known(self, each: WorkItem, ways: Sequence[Callable[[WorkItem], Awaitable[str]]]) -> str:
        """Submit, alternating between `ways`, until accepted or refused. Returns the job id; empty if refused."""
        backoff, tries = Backoff(), 0
        while True:
            way = ways[tries % len(ways)]
            tries += 1
            try:
                job_id = await way(each)
            # NotDurableYet: accepted, but not yet durable, so the same key is submitted again until it is.
            except (Unavailable, IntakeRefused, NotDurableYet, OSError, TimeoutError) as exc:
                self._journal.write(IN_DOUBT, each.number, note=_note(exc))
                await asyncio.sleep(min(1.0, backoff.next_s()))
                continue
            except HoldfastError as exc:
                self._journal.write(REFUSED, each.number, note=_note(exc))
                return ""
            self._accept(each, job_id, way.__name__.lstrip("_"))
            return job_id

    def _accept(self, each: WorkItem, job_id: str, way: str) -> None:
        first = self._is_open(each)
        self._journal.write(ACCEPTED, each.number, job_id, way)
        if first:
            self.on_accepted(each, job_id)

    # Ways of submission --------------------------------------------------------------------------------------

    async def _submit(self, each: WorkItem) -> str:
        receipt = await (await self._backend.connections.submitter()).submit(self._envelope(each))
        return receipt.job_id

    async def _send_bulk(self, items: Sequence[WorkItem]) -> list[str]:
        receipts = await (await self._backend.connections.submitter()).submit_many(
            [self._envelope(each) for each in items]
        )
        return [receipt.job_id for receipt in receipts]

    async def _post(self, each: WorkItem) -> str:
        answer = await self._web.call(
            "POST", "/api/v1/jobs", json=_document(each), headers={"Idempotency-Key": each.key}
        )
        return str(answer["job_id"])

    async def _post_bulk(self, items: Sequence[WorkItem]) -> list[str]:
        jobs = [_document(each) | {"idempotency_key": each.key} for each in items]
        answer = await self._web.call("POST", "/api/v1/jobs/bulk", json={"jobs": jobs})
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
        return self._backend.envelope(each.task, msgspec.json.encode(each.arguments), **options)


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


def _note(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"[:300]
