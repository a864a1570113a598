"""Problems are stable: every code is documented, and every error that can reach a caller has a status."""

from __future__ import annotations

from pathlib import Path

from holdfast import errors
from holdfast.http import routes as _routes  # noqa: F401 - defines more problems
from holdfast.http.problems import INTERNAL, TITLES, HttpError, problem_of, status_of

_PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "failure-codes.md"


def _kinds(kind: type[errors.HoldfastError]) -> set[type[errors.HoldfastError]]:
    return {kind}.union(*(_kinds(each) for each in kind.__subclasses__()))


def _rows(columns: int) -> list[list[str]]:
    lines = [line.strip("|").split("|") for line in _PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    return [[cell.strip(" `") for cell in line] for line in lines if len(line) == columns]


def test_every_http_code_is_documented_with_its_status() -> None:
    documented = {(code, int(status)) for code, _, status, _, _ in _rows(5)}
    # The error of a bulk item has the code of its cause.
    own = {(kind.code, kind.status) for kind in _http() if "code" in vars(kind)}
    assert documented == own | {(INTERNAL, 500)}


def test_every_code_a_caller_can_get_is_on_the_page() -> None:
    documented = {row[0] for columns in (3, 4, 5) for row in _rows(columns)}
    assert {kind.code for kind in _kinds(errors.HoldfastError) if kind.__module__.startswith("holdfast.")} <= documented


def _http() -> list[type[HttpError]]:
    return [kind for kind in _kinds(HttpError) if issubclass(kind, HttpError)]


def test_every_status_has_its_title() -> None:
    assert {status_of(kind) for kind in _kinds(errors.HoldfastError)} <= set(TITLES)


def test_a_problem_has_the_code_and_status_of_its_error() -> None:
    for error, status in (
        (errors.TransitionInvalid("j-1", "failed", "queued"), 409),
        (errors.Unauthorized("who?"), 401),
        (errors.Forbidden("no"), 403),
        (errors.NotFound("job", "j-1"), 404),
        (errors.Conflict("too late"), 409),
        (errors.EngineUnavailable("10.0.0.1:6379 refused"), 503),
        (errors.LedgerUnavailable("10.0.0.1:5432 refused"), 503),
    ):
        problem, headers = problem_of(error, "/x")
        assert (problem.status, problem.code) == (status, error.code)
        assert "10.0.0.1" not in problem.detail
        assert (b"retry-after" in dict(headers)) == (status == 503)
