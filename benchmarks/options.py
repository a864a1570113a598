"""Options of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.venv import PEERS

CORE: Final = ("submit", "drain", "latency", "backlog")
LEDGER: Final = ("audited", "projector", "lag", "durable", "effects", "history")
SERVICE: Final = ("http",)
MESSAGES: Final = ("kafka", "rabbitmq", "outbox", "delay")
RIVALS: Final = ("peers", "peers-latency", "peers-kill")
STAGES: Final = (*CORE, *LEDGER, *SERVICE, *MESSAGES, *RIVALS)
#: Names for several stages at once.
GROUPS: Final = {
    "core": CORE,
    "ledger": LEDGER,
    "service": SERVICE,
    "messages": MESSAGES,
    "rivals": (*RIVALS, "audited"),
}
#: What runs when nothing is named.
_DEFAULT: Final = ("core", "ledger", "service", "messages")
#: Takes long, so by its own name or with `--full` only.
_LONG: Final = "history"
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
    #: The same for the projector.
    ledger_sketch: Path | None
    #: Other systems to measure, by name.
    peers: tuple[str, ...]
    #: Jobs of which the projector gets a prepared feed.
    feed_jobs: int
    lag_s: float
    #: Events in the ledger before `history` begins.
    history_events: int
    #: Jobs in the ledger when a page of their list is read over HTTP.
    listed_jobs: int
    #: Messages in a broker, or events in the outbox, before they are taken.
    messages: int
    #: How long the outbox is written to while its delay is measured.
    delay_s: float
    #: Redis: "no", "everysec" or "always".
    aof: str
    out: Path


def parse(arguments: Sequence[str]) -> Options:
    """Options from the command line; argparse ends the program on a mistake."""
    parser = _parser()
    given = parser.parse_args(arguments)
    stages = _stages(parser, given.only, given.full)
    for option, script in (("--sketch", given.sketch), ("--ledger-sketch", given.ledger_sketch)):
        if script is not None and not script.is_file():
            parser.error(f"{option}: there is no file {script}")
    return Options(
        stages=stages,
        rounds=given.rounds,
        jobs=given.jobs,
        single_jobs=max(1, given.jobs // 10),
        latency_jobs=given.latency_jobs,
        shallow=min(10_000, given.jobs),
        deep=given.backlog or (1_000_000 if given.full else 200_000),
        sqlite_deep=given.backlog or (200_000 if given.full else 50_000),
        sketch=None if given.sketch is None else given.sketch.resolve(),
        ledger_sketch=None if given.ledger_sketch is None else given.ledger_sketch.resolve(),
        peers=_peers(parser, given.peers),
        feed_jobs=3 * given.jobs,
        lag_s=given.lag_seconds,
        history_events=given.events,
        listed_jobs=given.listed,
        messages=given.messages,
        delay_s=given.delay_seconds,
        aof=given.aof,
        out=given.out.resolve(),
    )


def _stages(parser: argparse.ArgumentParser, only: str, full: bool) -> tuple[str, ...]:
    names = [name for name in only.split(",") if name]
    if unknown := set(names) - set(STAGES) - set(GROUPS):
        parser.error(f"--only knows {', '.join((*STAGES, *GROUPS))}; not {', '.join(sorted(unknown))}")
    selected = {stage for name in names or _DEFAULT for stage in GROUPS.get(name, (name,))}
    if not full and _LONG not in names:
        selected.discard(_LONG)
    return tuple(stage for stage in STAGES if stage in selected)


def _peers(parser: argparse.ArgumentParser, given: str) -> tuple[str, ...]:
    known = tuple(PEERS)
    if given in ("all", "none"):
        return known if given == "all" else ()
    names = tuple(name for name in given.split(",") if name)
    if unknown := set(names) - set(known):
        parser.error(f"--peers knows {', '.join(known)}, all and none; not {', '.join(sorted(unknown))}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Compares holdfast on Redis and on SQLite with a bare Redis loop, with a ledger in "
        "PostgreSQL with other task systems there, and with brokers with FastStream; on separate servers.",
    )
    parser.add_argument(
        "--only", default="", metavar="NAMES", help=f"some of {','.join((*STAGES, *GROUPS))}; default all"
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="interleaved rounds (default 3)")
    parser.add_argument("--jobs", type=_positive, default=20_000, help="jobs per submit and drain (default 20,000)")
    parser.add_argument("--latency-jobs", type=_positive, default=300, help="jobs per latency probe (default 300)")
    parser.add_argument("--backlog", type=_positive, help="depth of the deep queue (default 200,000; SQLite 50,000)")
    parser.add_argument(
        "--full", action="store_true", help="deep queue of 1,000,000 jobs (SQLite 200,000); history of the ledger"
    )
    parser.add_argument("--aof", choices=("no", "everysec", "always"), default="no", help="Redis persistence")
    parser.add_argument("--sketch", type=Path, metavar="PATH", help="a yardstick script to run in the same rounds")
    parser.add_argument("--peers", default="all", metavar="NAMES", help=f"some of {','.join(PEERS)}, all or none")
    parser.add_argument("--lag-seconds", type=_positive, default=15, help="how long lag is measured (default 15)")
    parser.add_argument("--events", type=_positive, default=5_000_000, help="events for history (default 5,000,000)")
    parser.add_argument("--listed", type=_positive, default=1_000_000, help="jobs in the list (default 1,000,000)")
    parser.add_argument("--messages", type=_positive, default=40_000, help="messages and events (default 40,000)")
    parser.add_argument("--delay-seconds", type=_positive, default=5, help="how long delay is measured (default 5)")
    parser.add_argument("--ledger-sketch", type=Path, metavar="PATH", help="a yardstick script for the projector")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON, plot and scratch files")
    return parser


def _positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return number
