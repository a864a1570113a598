"""The check of `docs/spec-coverage.md`: each of its failures."""

from __future__ import annotations

import pytest

from tools.check_spec_coverage import CLAUSES, PAGE, Row, problems, read_rows

NODES = ["tests/a/test_x.py::test_one", "tests/a/test_x.py::TestY::test_two[redis-1]"]
FULL = [Row(clause, ("tests/a/test_x.py::test_one",), "done") for clause in CLAUSES]


def test_a_complete_page_passes() -> None:
    assert problems(FULL, NODES) == []


@pytest.mark.parametrize(
    "test",
    [
        "tests/a/test_x.py",
        "tests/a/test_x.py::TestY",
        "tests/a/test_x.py::TestY::test_two",
        "tests/a/test_x.py::TestY::test_two[redis-1]",
    ],
)
def test_a_test_can_be_named_by_any_prefix(test: str) -> None:
    assert problems([Row("S1", (test,), "done"), *FULL[1:]], NODES) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (FULL[1:], "S1: has no row"),
        ([*FULL, FULL[0]], "S1: has 2 rows"),
        ([*FULL, Row("Z1", (), "not yet")], "Z1: no such clause"),
        ([Row("S1", ("tests/a/test_x.py::test_on",), "done"), *FULL[1:]], "S1: test is not collected"),
        ([Row("S1", (), "done"), *FULL[1:]], "S1: done, but names no test"),
        ([Row("S1", (), "nearly"), *FULL[1:]], "S1: state must be"),
        ([Row("S1", (), "partly: "), *FULL[1:]], "S1: state must be"),
    ],
)
def test_each_mistake_is_reported(rows: list[Row], message: str) -> None:
    (problem,) = problems(rows, NODES)
    assert problem.startswith(message)


def test_rows_are_read_from_the_table() -> None:
    row = "| S1 | what | `here` | `tests/a/test_x.py::test_one` and `tests/b.py` | done |"
    page = f"| clause | x |\n|---|---|\n{row}\n"
    assert read_rows(page) == [Row("S1", ("tests/a/test_x.py::test_one", "tests/b.py"), "done")]


def test_a_contract_test_stands_for_both_engines() -> None:
    (row,) = read_rows("| S1 | what | here | `contract::test_one` | done |")
    assert row.tests == (
        "tests/engine/test_contract.py::TestSqlite::test_one",
        "tests/engine/test_contract.py::TestRedis::test_one",
    )


def test_the_projects_page_has_every_clause_once() -> None:
    rows = read_rows(PAGE.read_text(encoding="utf-8"))
    assert [row.clause for row in rows] == list(CLAUSES)
    assert len(CLAUSES) == 80
