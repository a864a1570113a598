"""Nothing that a stream, hash, set, broker or request contains raises out of its parser.

Ten thousand mutated messages here; more with `python -m tests.fuzz`. The registry of parsers is complete.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import holdfast
from tests.fuzz.registry import NOT_PARSERS, TARGETS
from tests.fuzz.run import make_case, run_all
from tests.fuzz.targets import Target

CASES: Final = 10_000
SOURCE: Final = Path(holdfast.__file__).parent
PACKAGES: Final = ("core", "engine", "brokers", "triggers", "http", "outbox", "webhooks", "ledger", "neighbours")
_names_a_parser: Final = re.compile(r"_?(parse|decode|unpack)(_|$)").match


def test_mutated_messages() -> None:
    """`FUZZ_SEED` repeats a run; the failure names seed, target and case."""
    seed = int(os.environ.get("FUZZ_SEED") or os.urandom(4).hex(), 10 if os.environ.get("FUZZ_SEED") else 16)
    print(f"FUZZ_SEED={seed}")
    for finding in run_all(CASES, seed):
        pytest.fail(
            f"python -m tests.fuzz --seed {seed} --target {finding.target!r} --case {finding.case}\n"
            f"{finding.fields!r:.1000}\n{finding.error}"
        )


def test_the_same_seed_gives_the_same_messages() -> None:
    target = TARGETS[0]
    first, again, other = ([make_case(target, seed, case) for case in range(100)] for seed in (7, 7, 8))
    assert first == again
    assert first != other


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_corpus_is_valid(target: Target) -> None:
    """A message of the corpus is read, so that its mutants get past the first check."""
    read = 0
    for fields in target.corpus:
        try:
            target.run(fields)
            read += 1
        except target.refusals:
            continue
    assert read > 0


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_any_fields(target: Target) -> None:
    """Fields by Hypothesis: any bytes, and bytes of the corpus."""
    known = sorted({part for fields in target.corpus for part in fields})
    part = st.one_of(st.sampled_from(known), st.binary(max_size=60), st.text(max_size=30).map(_encode))

    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(part, max_size=20).map(tuple))
    def run(fields: tuple[bytes, ...]) -> None:
        try:
            target.run(fields)
        except target.refusals:
            return

    run()


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def test_every_parser_is_registered() -> None:
    """Each function that is named as a parser belongs to a target, or is listed with the reason why it needs none."""
    covered = {name for target in TARGETS for name in target.covers}
    assert covered.isdisjoint(NOT_PARSERS)
    known = set(_functions())
    assert {name for name in known if _names_a_parser(name.rpartition(".")[2])} <= covered | NOT_PARSERS.keys()
    assert covered | NOT_PARSERS.keys() <= known, "a function was renamed or removed"


def _functions() -> Iterator[str]:
    for package in PACKAGES:
        for path in sorted((SOURCE / package).rglob("*.py")):
            module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            yield from _named(ast.parse(path.read_text()), module)


def _named(tree: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}.{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name
            yield from _named(node, name)
