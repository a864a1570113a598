"""Run mutated messages through the parsers. The same seed gives the same cases."""

from __future__ import annotations

import argparse
import itertools
import logging
import secrets
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from random import Random
from typing import NamedTuple

from tests.fuzz.mutation import Fields, mutate
from tests.fuzz.registry import TARGETS
from tests.fuzz.targets import Target


class Finding(NamedTuple):
    """A parser raised what its callers do not handle."""

    target: str
    case: int
    fields: Fields
    error: str

    @property
    def key(self) -> tuple[str, str]:
        """The same for findings with the same cause."""
        return self.target, self.error.strip().splitlines()[-1][:60] + self.error.strip().splitlines()[-2][:120]


def make_case(target: Target, seed: int, case: int) -> Fields:
    """The message of a case: the first ones are the valid messages of the corpus."""
    if case < len(target.corpus):
        return target.corpus[case]
    random = Random(f"{seed}/{target.name}/{case}")
    others = tuple(itertools.chain.from_iterable(target.corpus))
    return mutate(random.choice(target.corpus), others, random)


def run_case(target: Target, seed: int, case: int) -> Finding | None:
    fields = make_case(target, seed, case)
    try:
        target.run(fields)
    except target.refusals:
        return None
    except Exception:  # noqa: BLE001 - that is what is looked for
        return Finding(target.name, case, fields, traceback.format_exc(limit=-3))
    return None


def run_all(cases: int, seed: int, targets: Sequence[Target] = TARGETS) -> Iterator[Finding]:
    """Run this many cases in all, evenly over the targets."""
    for number in range(cases):
        target = targets[number % len(targets)]
        if (finding := run_case(target, seed, number // len(targets))) is not None:
            yield finding


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--target", action="append", help="only this target; can be repeated")
    parser.add_argument("--case", type=int, default=None, help="only this case of the target")
    given = parser.parse_args(arguments)
    seed = secrets.randbelow(2**32) if given.seed is None else given.seed
    targets = [target for target in TARGETS if not given.target or target.name in given.target]
    logging.disable()
    began = time.monotonic()
    if given.case is None:
        findings: Iterator[Finding | None] = run_all(given.cases, seed, targets)
    else:
        print(make_case(targets[0], seed, given.case))
        findings = iter([run_case(targets[0], seed, given.case)])
    known: dict[tuple[str, str], int] = {}
    for finding in filter(None, findings):
        known[finding.key] = known.get(finding.key, 0) + 1
        if known[finding.key] == 1:
            print(f"--target {finding.target!r} --seed {seed} --case {finding.case}: {finding.fields!r:.300}")
            print(finding.error)
    print(f"seed {seed}: {given.cases} cases, {len(targets)} targets, {time.monotonic() - began:.0f} s")
    print(f"{sum(known.values())} findings, {len(known)} kinds")
    return 1 if known else 0


if __name__ == "__main__":
    sys.exit(main())
