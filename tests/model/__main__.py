"""Explore every scenario, also the large ones, and print the steps that lead to each violation; about two minutes.

python -m tests.model                            every scenario under all rules
python -m tests.model ledger both                these scenarios
python -m tests.model ledger --without act-mark  what happens without some of the rules
python -m tests.model ledger --no-rules          what happens without verification

Exit 1 if a violation is found under all rules, except in the scenario of the known limit.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

from tests.model.epochs import Model
from tests.model.exploration import MAX_STATES, Result, explore
from tests.model.rules import ALL_RULES, NO_RULES, RULES, Rule, Scenario
from tests.model.scenarios import KNOWN_LIMIT, SCENARIOS

_PROGRESS_S: Final = 5.0


class Progress:
    """Prints a line every few seconds."""

    def __init__(self) -> None:
        self._printed_at = time.monotonic()

    def show(self, result: Result) -> None:
        if time.monotonic() - self._printed_at >= _PROGRESS_S:
            self._printed_at = time.monotonic()
            print(f"  … depth {result.depth}, {result.states:,} states, {result.steps:,} steps", flush=True)


def run(scenario: Scenario, rules: frozenset[Rule], max_states: int) -> Result:
    """Explore a scenario and print what was found."""
    print(f"{scenario.name}: {scenario.about}", flush=True)
    result = explore(Model(scenario, rules), max_states=max_states, on_level=Progress().show)
    extent = "complete" if result.is_complete else "cut off"
    print(
        f"  {result.states:,} states, {result.steps:,} steps, depth {result.depth}, {extent}, {result.seconds:.1f} s; "
        f"violations: {', '.join(result.lengths) or 'none'}"
    )
    for _, finding in sorted(result.findings.items()):
        print(finding.describe(), flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.model",
        description=__doc__.split("\n")[0],
        epilog="rules:\n" + "\n".join(f"  {rule:14} {text}" for rule, text in RULES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"one of {', '.join(SCENARIOS)}")
    taken_out = parser.add_mutually_exclusive_group()
    taken_out.add_argument(
        "--without", action="append", default=[], choices=RULES, help="without this rule; repeatable"
    )
    taken_out.add_argument("--no-rules", action="store_true", help="without any rule")
    parser.add_argument("--states", type=int, default=MAX_STATES, help="cut off above this; default: %(default)s")
    options = parser.parse_args(arguments)
    unknown = set(options.scenarios) - SCENARIOS.keys()
    if unknown:
        parser.error(f"scenario {min(unknown)!r} not found; use one of {', '.join(SCENARIOS)}")
    rules = NO_RULES if options.no_rules else ALL_RULES - set(options.without)
    broken = [
        name
        for name in options.scenarios or SCENARIOS
        if run(SCENARIOS[name], rules, options.states).findings and name != KNOWN_LIMIT
    ]
    print(f"violations in: {', '.join(broken) or 'no scenario, except the known limit'}")
    return 1 if broken and rules == ALL_RULES else 0


if __name__ == "__main__":
    sys.exit(main())
