"""The parts of the benchmarks that decide what is measured and reported."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from benchmarks import loaded, report
from benchmarks.model import FASTSTREAM, FASTSTREAM_PUSH, OURS_LEDGER, PGQUEUER, Results
from benchmarks.options import CORE, LEDGER, MESSAGES, RIVALS, SERVICE, parse
from benchmarks.page import page
from benchmarks.peers.field import FIELD
from benchmarks.peers.venv import PEERS
from benchmarks.run import STAGES as RUN_STAGES
from benchmarks.sides.channel import watched
from benchmarks.stages.audited import Audited
from benchmarks.stages.consume import ConsumeKafka
from benchmarks.stages.stage import Stage
from benchmarks.usage import tree_cpu_s


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ([], (*CORE, *LEDGER[:-1], *SERVICE, *MESSAGES)),
        (["--full"], (*CORE, *LEDGER, *SERVICE, *MESSAGES)),
        (["--only", "core"], CORE),
        (["--only", "ledger"], LEDGER[:-1]),
        (["--only", "ledger", "--full"], LEDGER),
        (["--only", "history"], ("history",)),
        (["--only", "durable,drain"], ("drain", "durable")),
        (["--only", "messages"], ("kafka", "rabbitmq", "outbox", "delay")),
        (["--only", "rivals"], ("audited", *RIVALS)),
    ],
)
def test_the_long_stage_runs_only_on_request(arguments: list[str], stages: tuple[str, ...]) -> None:
    assert parse(arguments).stages == stages


@pytest.mark.parametrize(
    "arguments", [["--only", "nothing"], ["--peers", "unknown"], ["--ledger-sketch", "/no/such/file"]]
)
def test_an_invalid_argument_exits_with_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse(arguments)
    assert exited.value.code == 2


def test_peers_can_be_chosen() -> None:
    assert parse([]).peers == tuple(PEERS) == (*(peer.name for peer in FIELD), "faststream")
    assert parse(["--peers", "none"]).peers == ()
    assert parse(["--peers", "pgqueuer"]).peers == ("pgqueuer",)


def test_every_stage_can_be_run() -> None:
    assert set(RUN_STAGES) == {*CORE, *LEDGER, *SERVICE, *MESSAGES, *RIVALS}


def test_the_page_has_medians_and_ratios() -> None:
    results = Results("2026-11-15T12:00:00+00:00", {"cores": "2"}, {"rounds": 3})
    for round_number, (our_rate, peer_rate) in enumerate([(9_000, 10_000), (12_000, 10_000), (12_000, 10_000)], 1):
        results.add("audited", OURS_LEDGER, round_number, our_rate)
        results.add("audited", PGQUEUER, round_number, peer_rate)
    results.summarise(Audited.measures)
    text = page([results])
    assert "| until all is recorded, jobs/s | 12,000 | 10,000 |" in text
    assert "| until all is recorded, × pgqueuer | 1.20 | 1.00 |" in text


def test_a_consumer_is_compared_with_both_faststream_sides() -> None:
    results = Results("2026-11-15T12:00:00+00:00", {}, {})
    for side, rate in ((OURS_LEDGER, 9_000), (FASTSTREAM, 6_000), (FASTSTREAM_PUSH, 3_000)):
        results.add("kafka", side, 1, rate)
    results.summarise(ConsumeKafka.measures)
    console = Console(width=120, record=True, file=StringIO())
    report.print_tables(console, results, [cast(Stage, ConsumeKafka)])
    our_line = next(line for line in console.export_text().splitlines() if OURS_LEDGER in line)
    assert our_line.split()[-4:] == ["9,000", "9,000", "1.50", "3.00"]


async def test_the_rate_is_measured_from_the_first_finished_job() -> None:
    counts = iter([0, 0, 10, 40, 110])
    measured = await watched(lambda: next(counts), 110)
    assert measured["rate"] > 0
    assert next(counts, None) is None


def test_cpu_of_ended_children_is_counted() -> None:
    burn = "sum(range(10_000_000))"
    before = tree_cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", burn], check=True, cwd=Path(__file__).parent)
    assert tree_cpu_s(os.getpid()) - before > 0.05


def test_the_report_of_requests_on_a_loaded_machine(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {step: number * 1_000_000 for number, step in enumerate(loaded.STEPS)}
    slow = {**steps, "answered": 39_000_000, "got": 40_000_000}
    waited = {"caller": 1.0, "service": 5.0, "Redis": 1.0}
    requests = [
        loaded.Request(number, slow if number > 90 else steps, dict.fromkeys(waited, 0.5), waited)
        for number in range(100)
    ]
    options = loaded.Options(seconds=10, rate=10, busy=2, apart=False, ledger=False, slowest=1, out=None)
    assert (requests[0].total_ms, requests[0].unexplained_ms, requests[-1].unexplained_ms) == (9.0, 0.5, 31.5)
    assert not loaded.report(requests, options)
    assert loaded.report(requests[:90], options)
    printed = capsys.readouterr().out
    assert "p50 9.0 ms, p95 40.0 ms (4.4 × p50)" in printed
    assert "service ran 0.5, waited for a core 5.0" in printed
