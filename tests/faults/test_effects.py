"""Effects under faults (requirement E2): an effect happens once, or is reported as in doubt."""

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
from tests.faults.support import SETTINGS, SOURCE, WorkerProcess, eventually, kill_processes_of, pause_outside_commit

pytestmark = pytest.mark.faults

SAMPLE = Path(effects_sample.__file__).resolve()


class Deployment:
    """An engine, a ledger, worker processes, and the log of acts."""

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

    async def start_worker(self) -> WorkerProcess:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        settings = {f"HOLDFAST_{name.upper()}": str(value) for name, value in self.settings.items() if value}
        path = os.pathsep.join(filter(None, [str(SOURCE), inherited.get("PYTHONPATH", "")]))
        environment = inherited | settings | {"PYTHONPATH": path, "HOLDFAST_URL": self.url}
        environment[effects_sample.ACTS_VARIABLE] = str(self.acts_log)
        command = [sys.executable, "-m", "holdfast", "worker", f"{SAMPLE}:app"]
        worker = WorkerProcess(command, self.folder, environment, self.folder / f"worker-{len(self.workers)}.log")
        self.workers.append(worker)
        await worker.wait_for_log(" started on ")
        return worker

    async def submit(self, task: str, payload: bytes = b"{}", **options: Any) -> Job[Any]:
        return await self.app.submit_raw(task, payload, **options)

    async def wait_state(self, job: Job[Any], state: State) -> JobInfo:
        async def check() -> JobInfo | None:
            try:
                (info,) = await self.app.engine.get(job.queue, [job.id])
            except EngineUnavailable:
                return None
            return info if info is not None and info.state is state else None

        info: JobInfo = await eventually(check, f"the job to be {state}")
        return info

    async def get_key(self, key: str) -> EffectKey | None:
        backend = backend_of(self.app)
        assert backend.ledger is not None
        return (await backend.ledger.effects.get([("default", key)]))[0]

    async def wait_key_state(self, key: str, state: EffectState) -> None:
        async def check() -> bool:
            effect_key = await self.get_key(key)
            return effect_key is not None and effect_key.state is state

        await eventually(check, f"the key to be {state}")

    async def wait_acts(self, count: int) -> None:
        await eventually(lambda: len(self.acts()) >= count, f"{count} acts")

    async def close(self) -> None:
        for worker in self.workers:
            worker.clean_up()
        kill_processes_of(self.settings["namespace"])
        await self.app.close()


@pytest.fixture(params=["embedded", "redis+postgres"])
async def deployment(request: pytest.FixtureRequest, tmp_path: Path, namespace: str) -> AsyncIterator[Deployment]:
    url, ledger = f"sqlite:///{tmp_path / 'holdfast.db'}", None
    if request.param != "embedded":
        url, ledger = request.getfixturevalue("redis_url"), request.getfixturevalue("postgres_url")
    deployment = Deployment(url, ledger, namespace, tmp_path)
    await deployment.app.open()
    yield deployment
    await deployment.close()


@pytest.fixture
async def killable_ledger(
    make_postgres: Callable[..., PostgresServer], redis_url: str, namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[Deployment, PostgresServer]]:
    """A ledger that can be killed."""
    server = make_postgres()
    deployment = Deployment(redis_url, server.url, namespace, tmp_path)
    await deployment.app.open()
    yield deployment, server
    await deployment.close()


async def test_an_effect_killed_between_act_and_record_is_in_doubt(deployment: Deployment) -> None:
    first, other = await deployment.start_worker(), await deployment.start_worker()
    job = await deployment.submit("crash")
    await eventually(lambda: not (first.alive and other.alive), "the end of one worker")
    info = await deployment.wait_state(job, State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert info.attempt == 2
    effect_key = await deployment.get_key("crash")
    assert effect_key is not None
    assert (effect_key.state, effect_key.attempt) == (EffectState.IN_DOUBT, 1)
    assert deployment.acts() == ["crash"]


async def test_run_again_repeats_an_effect_killed_between_act_and_record(deployment: Deployment) -> None:
    await deployment.start_worker()
    await deployment.start_worker()
    job = await deployment.submit("crash_again")
    assert await job.result(60) == "did again"
    assert deployment.acts() == ["again", "again"]


async def test_duplicates_on_two_workers_act_once(deployment: Deployment) -> None:
    await deployment.start_worker()
    await deployment.start_worker()
    gate = deployment.folder / "gate"
    payload = f'{{"key": "same", "gate": "{gate}"}}'.encode()
    jobs = [await deployment.submit("wait", payload) for _ in range(6)]
    await deployment.wait_acts(1)
    gate.touch()
    assert [await job.result(60) for job in jobs] == ["did same"] * 6
    assert deployment.acts() == ["same"]


async def test_two_tenants_do_not_share_a_key(deployment: Deployment) -> None:
    await deployment.start_worker()
    gate = deployment.folder / "gate"
    gate.touch()
    payload = f'{{"key": "same", "gate": "{gate}"}}'.encode()
    jobs = [await deployment.submit("wait", payload, tenant_id=tenant) for tenant in ("a", "b")]
    assert [await job.result(60) for job in jobs] == ["did same"] * 2
    assert deployment.acts() == ["same", "same"]


async def test_a_worker_paused_past_its_lease_completes_its_effect_after_resuming(deployment: Deployment) -> None:
    first = await deployment.start_worker()
    gate = deployment.folder / "gate"
    job = await deployment.submit("wait_in_a_thread", f'{{"key": "late", "gate": "{gate}"}}'.encode())
    await deployment.wait_acts(1)
    pause_outside_commit(first, deployment.url)
    await deployment.start_worker()
    info = await deployment.wait_state(job, State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    gate.touch()
    first.resume()
    await deployment.wait_key_state("late", EffectState.DONE)
    await deployment.app.engine.move(job.queue, job.id, State.QUEUED, actor="me", reason="the effect is done")
    assert await job.result(60) == "did late"
    assert deployment.acts() == ["late"]


async def test_a_step_done_before_a_kill_is_not_repeated(deployment: Deployment) -> None:
    await deployment.start_worker()
    await deployment.start_worker()
    job = await deployment.submit("steps")
    assert await job.result(60) == "did first, did second"
    assert deployment.acts() == ["first", "second"]


# The ledger is killed ------------------------------------------------------------------------------


async def wait_backed_off(deployment: Deployment, job: Job[Any]) -> None:
    async def check() -> bool:
        (info,) = await deployment.app.engine.get(job.queue, [job.id])
        return info is not None and info.meta.unavailable_count > 0

    await eventually(check, "the job to back off")


async def test_an_outage_of_the_ledger_before_the_reservation(
    killable_ledger: tuple[Deployment, PostgresServer],
) -> None:
    deployment, server = killable_ledger
    await deployment.start_worker()
    gate = deployment.folder / "gate"
    gate.touch()
    payload = f'{{"key": "k", "gate": "{gate}"}}'.encode()
    assert await (await deployment.submit("wait", payload.replace(b'"k"', b'"before"'))).result(60) == "did before"
    server.kill()
    job = await deployment.submit("wait", payload)
    await wait_backed_off(deployment, job)
    assert deployment.acts() == ["before"]
    server.start()
    assert await job.result(60) == "did k"
    (info,) = await deployment.app.engine.get(job.queue, [job.id])
    assert info is not None
    assert (info.meta.retry_count, deployment.acts()) == (0, ["before", "k"])


async def test_a_short_outage_of_the_ledger_between_act_and_record(
    killable_ledger: tuple[Deployment, PostgresServer],
) -> None:
    deployment, server = killable_ledger
    # Longer than a restart of the server.
    deployment.settings |= {"visibility_timeout_s": 20.0}
    await deployment.start_worker()
    gate = deployment.folder / "gate"
    job = await deployment.submit("wait", f'{{"key": "k", "gate": "{gate}"}}'.encode())
    await deployment.wait_acts(1)
    server.kill()
    gate.touch()
    server.start()
    assert await job.result(60) == "did k"
    (info,) = await deployment.app.engine.get(job.queue, [job.id])
    assert info is not None
    assert (info.attempt, deployment.acts()) == (1, ["k"])


async def test_a_long_outage_of_the_ledger_between_act_and_record(
    killable_ledger: tuple[Deployment, PostgresServer],
) -> None:
    deployment, server = killable_ledger
    await deployment.start_worker()
    gate = deployment.folder / "gate"
    job = await deployment.submit("wait", f'{{"key": "k", "gate": "{gate}"}}'.encode())
    await deployment.wait_acts(1)
    server.kill()
    gate.touch()
    await wait_backed_off(deployment, job)
    server.start()
    info = await deployment.wait_state(job, State.SUSPENDED)
    assert info.failure is not None
    assert info.failure.code == "EFFECT_IN_DOUBT"
    assert deployment.acts() == ["k"]
