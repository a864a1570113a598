"""Check `docs/spec-coverage.md` against the list of clauses and the collected tests.

Fails if a clause has no row or several, a row names an unknown clause or a test that pytest does not collect, or a
clause is marked done without a test.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
PAGE: Final = ROOT / "docs" / "spec-coverage.md"

#: Families of clauses and the number of clauses in each.
FAMILIES: Final = {
    "S": 6,
    "Q": 15,
    "Y": 9,
    "E": 5,
    "D": 6,
    "A": 4,
    "L": 6,
    "H": 8,
    "T": 10,
    "O": 3,
    "M": 3,
    "X": 5,
}
CLAUSES: Final = tuple(f"{family}{number}" for family, count in FAMILIES.items() for number in range(1, count + 1))

_ROW: Final = re.compile(r"^\|\s*([A-Z]\d+)\s*\|(.*)\|\s*$")
_TEST: Final = re.compile(r"tests/[\w/]+\.py(?:::\w+)*(?:\[[^\]`]*\])?|contract::\w+")
#: `contract::test_x` on the page means test_x of the engine contract, on each of these.
_CONTRACT: Final = tuple(f"tests/engine/test_contract.py::{suite}::" for suite in ("TestSqlite", "TestRedis"))
_STATE: Final = re.compile(r"done|partly: .+|not yet(: .+)?")


@dataclass(frozen=True, slots=True)
class Row:
    """One clause's row on the page."""

    clause: str
    tests: tuple[str, ...]
    state: str


def read_rows(page: str) -> list[Row]:
    """The table's rows: clause | summary | where | tests | state."""
    rows = []
    for line in page.splitlines():
        found = _ROW.match(line)
        if found:
            cells = [cell.strip() for cell in found[2].split("|")]
            named = _TEST.findall(cells[2]) if len(cells) > 2 else []
            rows.append(Row(found[1], tuple(test for name in named for test in _expand(name)), cells[-1]))
    return rows


def problems(rows: Sequence[Row], collected: Iterable[str]) -> list[str]:
    """One line for each problem."""
    prefixes = {prefix for node in collected for prefix in _prefixes(node)}
    named = [row.clause for row in rows]
    found = [f"{clause}: has no row" for clause in CLAUSES if clause not in named]
    found += [f"{clause}: has {named.count(clause)} rows" for clause in sorted(set(named)) if named.count(clause) > 1]
    for row in rows:
        if row.clause not in CLAUSES:
            found.append(f"{row.clause}: no such clause")
        if not _STATE.fullmatch(row.state):
            found.append(f"{row.clause}: state must be 'done', 'partly: …' or 'not yet', not {row.state!r}")
        if row.state == "done" and not row.tests:
            found.append(f"{row.clause}: done, but names no test")
        found += [f"{row.clause}: test is not collected: {test}" for test in row.tests if test not in prefixes]
    return found


def collect_tests() -> list[str]:
    """The ids of all tests that pytest collects."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--no-header", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"pytest could not collect the tests:\n{done.stdout}{done.stderr}")
    return [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]


def _expand(name: str) -> Iterable[str]:
    if name.startswith("contract::"):
        return [suite + name.removeprefix("contract::") for suite in _CONTRACT]
    return [name]


def _prefixes(node: str) -> Iterable[str]:
    """Names of a test: `a.py::C::t[x]`, `a.py::C::t`, `a.py::C` and `a.py`."""
    yield node
    bare = node.partition("[")[0]
    while bare:
        yield bare
        bare = bare.rpartition("::")[0]


def main() -> int:
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    found = problems(rows, collect_tests())
    for line in found:
        print(line, file=sys.stderr)
    if found:
        return 1
    done = sum(row.state == "done" for row in rows)
    partly = sum(row.state.startswith("partly") for row in rows)
    print(f"spec coverage: {len(rows)} clauses, {done} done, {partly} partly, {len(rows) - done - partly} not yet")
    return 0


if __name__ == "__main__":
    sys.exit(main())
