"""What every stage is, and what they all work with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks.board import Board
from benchmarks.brokers import Kafka, RabbitMQ
from benchmarks.contest import Contestant
from benchmarks.model import BARE_PY, BARE_RAW, OURS_REDIS, OURS_SQLITE, Measure, Results
from benchmarks.options import Options
from benchmarks.postgres import Postgres
from benchmarks.sketch import Sketch
from benchmarks.stores import RedisStore, SqliteStore


class Probe(NamedTuple):
    """One measurement. `run` takes the round's number and says in a few words what came out."""

    label: str
    run: Callable[[int], str]


class Stage(Protocol):
    """A group of measures."""

    name: str
    title: str
    measures: Sequence[Measure]
    #: One round is enough, whatever was asked for.
    once: bool = False

    def prepare(self) -> None:
        """Before the first round."""

    def probes(self) -> Sequence[Probe]:
        """In the order of one round."""
        ...

    def finish(self) -> str:
        """After the last round; what came out, or nothing."""
        return ""


@dataclass(frozen=True)
class Hall:
    """Where the contest takes place: options, servers, results."""

    options: Options
    redis: RedisStore
    sqlite: SqliteStore
    #: These run once a stage has asked for them.
    postgres: Postgres
    kafka: Kafka
    rabbitmq: RabbitMQ
    board: Board
    scratch: Path
    results: Results
    #: Closed at the end of the run, however it ends.
    cleanup: ExitStack

    @property
    def ours(self) -> list[Contestant]:
        """holdfast on both engines."""
        module = "benchmarks.sides.ours"
        return [
            Contestant(OURS_REDIS, module, self.redis, self.scratch),
            Contestant(OURS_SQLITE, module, self.sqlite, self.scratch),
        ]

    @property
    def bare(self) -> list[Contestant]:
        """The bare loops."""
        module = "benchmarks.sides.bare"
        return [
            Contestant(BARE_PY, module, self.redis, self.scratch, "redis-py"),
            Contestant(BARE_RAW, module, self.redis, self.scratch, "raw"),
        ]

    @property
    def sketch(self) -> Sketch | None:
        """The external yardstick, if one was named."""
        return None if self.options.sketch is None else Sketch(self.options.sketch, self.redis)
