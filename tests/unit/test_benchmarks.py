"""The parts of the benchmarks that decide what is measured and what is said about it."""

from __future__ import annotations

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import cast

import pytest
from rich.console import Console

from benchmarks import report
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
def test_the_long_stage_runs_when_it_is_asked_for(arguments: list[str], stages: tuple[str, ...]) -> None:
    assert parse(arguments).stages == stages


@pytest.mark.parametrize(
    "arguments", [["--only", "nothing"], ["--peers", "nobody"], ["--ledger-sketch", "/no/such/file"]]
)
def test_a_mistake_ends_the_program(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2


def test_peers_can_be_chosen() -> None:
    assert parse([]).peers == tuple(PEERS) == (*(peer.name for peer in FIELD), "faststream")
    assert parse(["--peers", "none"]).peers == ()
    assert parse(["--peers", "pgqueuer"]).peers == ("pgqueuer",)


def test_every_stage_can_be_run() -> None:
    assert set(RUN_STAGES) == {*CORE, *LEDGER, *SERVICE, *MESSAGES, *RIVALS}


def test_the_page_has_medians_and_ratios() -> None:
    results = Results("2026-11-15T12:00:00+00:00", {"cores": "2"}, {"rounds": 3})
    for round_number, (ours, theirs) in enumerate([(9_000, 10_000), (12_000, 10_000), (12_000, 10_000)], 1):
        results.add("audited", OURS_LEDGER, round_number, ours)
        results.add("audited", PGQUEUER, round_number, theirs)
    results.summarise(Audited.measures)
    text = page([results])
    assert "| until all is recorded, jobs/s | 12,000 | 10,000 |" in text
    assert "| until all is recorded, × pgqueuer | 1.20 | 1.00 |" in text


def test_a_consumer_is_compared_with_both_of_faststreams() -> None:
    results = Results("2026-11-15T12:00:00+00:00", {}, {})
    for side, rate in ((OURS_LEDGER, 9_000), (FASTSTREAM, 6_000), (FASTSTREAM_PUSH, 3_000)):
        results.add("kafka", side, 1, rate)
    results.summarise(ConsumeKafka.measures)
    console = Console(width=120, record=True, file=StringIO())
    report.print_tables(console, results, [cast(Stage, ConsumeKafka)])
    ours = next(line for line in console.export_text().splitlines() if OURS_LEDGER in line)
    assert ours.split()[-4:] == ["9,000", "9,000", "1.50", "3.00"]


async def test_what_is_watched_is_measured_from_the_first_that_is_done() -> None:
    counts = iter([0, 0, 10, 40, 110])
    answer = await watched(lambda: next(counts), 110)
    assert answer["rate"] > 0
    assert next(counts, None) is None


def test_cpu_of_ended_children_is_counted() -> None:
    burn = "sum(range(10_000_000))"
    before = tree_cpu_s(os.getpid())
    subprocess.run([sys.executable, "-c", burn], check=True, cwd=Path(__file__).parent)
    assert tree_cpu_s(os.getpid()) - before > 0.05
