"""Effects under faults (requirement E2): whatever dies, an effect happens once, or is in doubt and says so."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, Job, State
from holdfast.core.job import JobInfo
from holdfast.errors import EngineUnavailable
from holdfast.execution.backend import backend_of
from holdfast.ledger.port.effects import EffectKey, EffectState
from holdfast.verification.chaos.servers import PostgresServer
from tests.faults import effects_sample
from tests.faults.support import SETTINGS, SOURCE, WorkerProcess, eventually, stand_still

pytestmark = pytest.mark.faults

SAMPLE = Path(effects_sample.__file__).resolve()


class Scene:
    """An engine, a ledger, worker processes, and what was really done."""

    def __init__(self, url: str, ledger: str | None, namespace: str, folder: Path) -> None:
        self.folder = folder
        self.acts_log = folder / "acts.log"
        settings: dict[str, Any] = {**SETTINGS, "namespace": namespace, "ledger": ledger}
        settings.pop("feed_limit")
        self.settings = settings
        self.app = Holdfast(url, **settings)
        self.url = url
        self.workers: list[WorkerProcess] = []

    def acts(self) -> list[str]:
        return [line.split()[0] for line in self.acts_log.read_text().splitlines()] if self.acts_log.exists() else []

    async def worker(self) -> WorkerProcess:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        settings = {f"HOLDFAST_{name.upper()}": str(value) for name, value in self.settings.items() if value}
        path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH", "")]))
        environment = kept | settings | {"PYTHONPATH": path, "HOLDFAST_URL": self.url}
        environment[effects_sample.ACTS_VARIABLE] = str(self.acts_log)
        command = [sys.executable, "-m", "holdfast", "worker", f"{SAMPLE}:app"]
        worker = WorkerProcess(command, self.folder, environment, self.folder / f"worker-{len(self.workers)}.log")
        self.workers.append(worker)
        await worker.has_said(" started on ")
        return worker

    async def submit(self, task: str, payload: bytes = b"{}", **options: Any) -> Job[Any]:
        return await self.app.submit_raw(task, payload, **options)

    async def in_state(self, job: Job[Any], state: State) -> JobInfo:
        async def look() -> JobInfo | None:
            try:
                (view,) = await self.app.engine.get(job.queue, [job.id])
            except EngineUnavailable:
                return None
            return view if view is not None and view.state is state else None

        view: JobInfo = await eventually(look, f"the job to be {state}")
        return view

    async def key(self, key: str) -> EffectKey | None:
        backend = backend_of(self.app)
        assert backend.ledger is not None
        return (await backend.ledger.effects.get([("default", key)]))[0]

    async def key_is(self, key: str, state: EffectState) -> None:
        async def look() -> bool:
            held = await self.key(key)
            return held is not None and held.state is state

        await eventually(look, f"the key to be {state}")

    async def acted(self, count: int) -> None:
        await eventually(lambda: len(self.acts()) >= count, f"{count} acts")

    async def close(self) -> None:
        for worker in self.workers:
            worker.clean_up()
        await self.app.close()


@pytest.fixture(params=["embedded", "redis+postgres"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Scene]:
    url, ledger = f"sqlite:///{tmp_path / 'holdfast.db'}", None
    if request.param != "embedded":
        url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
    scene = Scene(url, ledger, namespace, tmp_path)
    await scene.app.open()
    yield scene
    await scene.close()


@pytest.fixture
async def fragile(
    make_postgres: Callable[..., PostgresServer], redis_url: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[Scene, PostgresServer]]:
    """A ledger that can be killed."""
    server = make_postgres()
    scene = Scene(redis_url, server.url, namespace, tmp_path)
    await scene.app.open()
    yield scene, server
    await scene.close()


async def test_killed_between_act_and_record_it_is_in_doubt_and_happened_once(scene: Scene) -> None:
    doomed, other = await scene.worker(), await scene.worker()
    job = await scene.submit("crash")
    await eventually(lambda: not (doomed.alive and other.alive), "one of the workers to die")
    view = await scene.in_state(job, State.SUSPENDED)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert view.attempt == 2
    held = await scene.key("crash")
    assert held is not None
    assert (held.state, held.attempt) == (EffectState.IN_DOUBT, 1)
    assert scene.acts() == ["crash"]


async def test_killed_between_act_and_record_run_again_acts_again(scene: Scene) -> None:
    await scene.worker()
    await scene.worker()
    job = await scene.submit("crash_again")
    assert await job.result(60) == "did again"
    assert scene.acts() == ["again", "again"]


async def test_duplicates_on_two_worker_processes_are_one_act(scene: Scene) -> None:
    await scene.worker()
    await scene.worker()
    gate = scene.folder / "gate"
    payload = f'{{"key": "same", "gate": "{gate}"}}'.encode()
    jobs = [await scene.submit("wait", payload) for _ in range(6)]
    await scene.acted(1)
    gate.touch()
    assert [await job.result(60) for job in jobs] == ["did same"] * 6
    assert scene.acts() == ["same"]


async def test_two_tenants_do_not_share_a_key(scene: Scene) -> None:
    await scene.worker()
    gate = scene.folder / "gate"
    gate.touch()
    payload = f'{{"key": "same", "gate": "{gate}"}}'.encode()
    jobs = [await scene.submit("wait", payload, tenant_id=tenant) for tenant in ("a", "b")]
    assert [await job.result(60) for job in jobs] == ["did same"] * 2
    assert scene.acts() == ["same", "same"]


async def test_a_worker_stopped_past_its_lease_resolves_the_doubt_when_it_comes_back(scene: Scene) -> None:
    first = await scene.worker()
    gate = scene.folder / "gate"
    job = await scene.submit("wait_in_a_thread", f'{{"key": "late", "gate": "{gate}"}}'.encode())
    await scene.acted(1)
    stand_still(first, scene.url)
    await scene.worker()
    view = await scene.in_state(job, State.SUSPENDED)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    gate.touch()
    first.resume()
    await scene.key_is("late", EffectState.DONE)
    await scene.app.engine.move(job.queue, job.id, State.QUEUED, actor="me", reason="it has resolved itself")
    assert await job.result(60) == "did late"
    assert scene.acts() == ["late"]


async def test_killed_between_two_steps_the_first_is_not_taken_again(scene: Scene) -> None:
    await scene.worker()
    await scene.worker()
    job = await scene.submit("steps")
    assert await job.result(60) == "did first, did second"
    assert scene.acts() == ["first", "second"]


# The ledger is killed ------------------------------------------------------------------------------


async def backed_off(scene: Scene, job: Job[Any]) -> None:
    async def look() -> bool:
        (view,) = await scene.app.engine.get(job.queue, [job.id])
        return view is not None and view.meta.unavailable_count > 0

    await eventually(look, "the job to back off")


async def test_the_ledger_is_killed_before_the_reservation(fragile: tuple[Scene, PostgresServer]) -> None:
    scene, server = fragile
    await scene.worker()
    gate = scene.folder / "gate"
    gate.touch()
    payload = f'{{"key": "k", "gate": "{gate}"}}'.encode()
    assert await (await scene.submit("wait", payload.replace(b'"k"', b'"before"'))).result(60) == "did before"
    server.kill()
    job = await scene.submit("wait", payload)
    await backed_off(scene, job)
    assert scene.acts() == ["before"]
    server.start()
    assert await job.result(60) == "did k"
    (view,) = await scene.app.engine.get(job.queue, [job.id])
    assert view is not None
    assert (view.meta.retry_count, scene.acts()) == (0, ["before", "k"])


async def test_the_ledger_is_killed_between_act_and_record_and_comes_back(
    fragile: tuple[Scene, PostgresServer],
) -> None:
    scene, server = fragile
    # Long enough for the server to start again.
    scene.settings |= {"visibility_timeout_s": 20.0}
    await scene.worker()
    gate = scene.folder / "gate"
    job = await scene.submit("wait", f'{{"key": "k", "gate": "{gate}"}}'.encode())
    await scene.acted(1)
    server.kill()
    gate.touch()
    server.start()
    assert await job.result(60) == "did k"
    (view,) = await scene.app.engine.get(job.queue, [job.id])
    assert view is not None
    assert (view.attempt, scene.acts()) == (1, ["k"])


async def test_the_ledger_is_killed_between_act_and_record_and_stays_away(
    fragile: tuple[Scene, PostgresServer],
) -> None:
    scene, server = fragile
    await scene.worker()
    gate = scene.folder / "gate"
    job = await scene.submit("wait", f'{{"key": "k", "gate": "{gate}"}}'.encode())
    await scene.acted(1)
    server.kill()
    gate.touch()
    await backed_off(scene, job)
    server.start()
    view = await scene.in_state(job, State.SUSPENDED)
    assert view.failure is not None
    assert view.failure.code == "EFFECT_IN_DOUBT"
    assert scene.acts() == ["k"]
