"""What was asked for on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

STAGES: Final = ("submit", "drain", "latency", "backlog")
RESULTS: Final = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True, slots=True)
class Options:
    """One run's sizes and choices."""

    stages: tuple[str, ...]
    rounds: int
    jobs: int
    single_jobs: int
    latency_jobs: int
    #: The two depths of queue that are compared.
    shallow: int
    deep: int
    sqlite_deep: int
    sketch: Path | None
    #: Redis: "no", "everysec" or "always".
    aof: str
    out: Path


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; argparse ends the program on a mistake."""
    parser = _parser()
    given = parser.parse_args(arguments)
    stages = tuple(name for name in given.only.split(",") if name)
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--only knows {', '.join(STAGES)}; not {', '.join(sorted(unknown))}")
    if given.sketch is not None and not given.sketch.is_file():
        parser.error(f"--sketch: there is no file {given.sketch}")
    return Options(
        stages=stages or STAGES,
        rounds=given.rounds,
        jobs=given.jobs,
        single_jobs=max(1, given.jobs // 10),
        latency_jobs=given.latency_jobs,
        shallow=min(10_000, given.jobs),
        deep=given.backlog or (1_000_000 if given.full else 200_000),
        sqlite_deep=given.backlog or (200_000 if given.full else 50_000),
        sketch=None if given.sketch is None else given.sketch.resolve(),
        aof=given.aof,
        out=given.out.resolve(),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures holdfast on Redis and on SQLite beside a bare Redis loop, on servers of its own.",
    )
    parser.add_argument("--only", default="", metavar="NAMES", help=f"some of {','.join(STAGES)}; default all")
    parser.add_argument("--rounds", type=_positive, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--jobs", type=_positive, default=20_000, help="jobs per submit and drain (default 20,000)")
    parser.add_argument("--latency-jobs", type=_positive, default=300, help="jobs per latency probe (default 300)")
    parser.add_argument("--backlog", type=_positive, help="depth of the deep queue (default 200,000; SQLite 50,000)")
    parser.add_argument("--full", action="store_true", help="deep queue of 1,000,000 jobs (SQLite 200,000)")
    parser.add_argument("--aof", choices=("no", "everysec", "always"), default="no", help="Redis persistence")
    parser.add_argument("--sketch", type=Path, metavar="PATH", help="a yardstick script to run in the same rounds")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON, plot and scratch files")
    return parser


def _positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number
