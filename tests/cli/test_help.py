"""Help and reference: every command has examples that parse, and the page in docs/ is the program's own."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from holdfast.cli.exits import ExitCode
from holdfast.cli.program import program
from tests.cli.harness import SOURCE
from tools import gen_docs
from tools.cli_reference import examples, walk

#: A call in a code block, indented or fenced, up to a comment.
_CALL = re.compile(r"^(holdfast .*?)(?:\s{2,}#.*)?$", re.MULTILINE)
_CODE = re.compile(r"^```sh\n(.*?)^```$|^ {4}([^\n]*)$", re.MULTILINE | re.DOTALL)


def calls_in_the_docs() -> list[tuple[str, str]]:
    """Every call of the program in README and docs, with its page."""
    pages = [SOURCE.parent / "README.md", *sorted((SOURCE.parent / "docs").rglob("*.md"))]
    return [
        (page.name, call)
        for page in pages
        for fenced, indented in _CODE.findall(page.read_text(encoding="utf-8"))
        for call in _CALL.findall(fenced or indented)
    ]


ROOT = typer.main.get_command(program())
COMMANDS = dict(walk(ROOT, "holdfast"))
WANTED = {
    "holdfast dev",
    "holdfast worker",
    "holdfast upkeep",
    "holdfast serve",
    "holdfast submit",
    "holdfast jobs counts",
    "holdfast explain",
    "holdfast verify",
    "holdfast chaos",
    "holdfast reconcile",
    "holdfast jobs list",
    "holdfast jobs resume",
    "holdfast jobs show",
    "holdfast jobs watch",
    "holdfast jobs cancel",
    "holdfast jobs retry",
    "holdfast queues list",
    "holdfast queues pause",
    "holdfast queues resume",
    "holdfast queues limit",
    "holdfast queues concurrency",
    "holdfast queues alert",
    "holdfast queues tenant",
    "holdfast outbox list",
    "holdfast outbox retry",
    "holdfast outbox relay",
    "holdfast dlq list",
    "holdfast dlq groups",
    "holdfast dlq show",
    "holdfast dlq replay",
    "holdfast dlq discard",
    "holdfast dlq confirm",
    "holdfast dlq keep",
    "holdfast suspended list",
    "holdfast suspended show",
    "holdfast suspended resume",
    "holdfast suspended discard",
    "holdfast approvals list",
    "holdfast approvals show",
    "holdfast approvals approve",
    "holdfast approvals reject",
    "holdfast trigger run",
    "holdfast trigger check",
    "holdfast trigger status",
    "holdfast trigger executions",
    "holdfast trigger plan",
    "holdfast trigger pause",
    "holdfast trigger resume",
    "holdfast token create",
    "holdfast token list",
    "holdfast token revoke",
    "holdfast log",
    "holdfast doctor",
    "holdfast effects list",
    "holdfast effects show",
    "holdfast effects resolve",
    "holdfast effects create-table",
    "holdfast migrate up",
    "holdfast migrate down",
    "holdfast migrate status",
}
READING = WANTED - {
    "holdfast dev",
    "holdfast worker",
    "holdfast upkeep",
    "holdfast serve",
    "holdfast trigger run",
    "holdfast outbox relay",
}


def test_the_commands_are_all_there() -> None:
    assert set(COMMANDS) == WANTED


@pytest.mark.parametrize("path", sorted(WANTED))
def test_help_has_a_text_and_examples(path: str) -> None:
    answer = CliRunner().invoke(program(), [*path.split()[1:], "--help"])
    assert answer.exit_code == 0
    assert "Examples" in answer.output
    assert f"{path} " in answer.output or path in answer.output.split("Examples")[1]
    assert COMMANDS[path].help


@pytest.mark.parametrize("path", sorted(WANTED))
def test_the_examples_parse(path: str) -> None:
    own = [example for example in examples(COMMANDS[path]) if example.startswith(path)]
    assert own
    for example in own:
        parse(example)


@pytest.mark.parametrize(("page", "call"), calls_in_the_docs())
def test_the_calls_in_the_docs_parse(page: str, call: str) -> None:
    parse(call)


def parse(call: str) -> None:
    """A call, up to its first shell operator, is one that the parser takes."""
    words = shlex.split(call)
    end = next((place for place, word in enumerate(words) if word in ("|", "<", "&&")), len(words))
    path = next(" ".join(words[:length]) for length in (2, 3) if " ".join(words[:length]) in COMMANDS)
    COMMANDS[path].make_context(path, words[len(path.split()) : end]).close()


@pytest.mark.parametrize("path", sorted(WANTED))
def test_every_command_takes_the_shared_options(path: str) -> None:
    options = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    assert {"--url", "--namespace", "--debug"} <= options
    if path in READING:
        assert "--json" in options


@pytest.mark.parametrize("path", sorted(WANTED))
def test_every_parameter_says_what_it_is_for(path: str) -> None:
    parameters: list[Any] = COMMANDS[path].params
    assert [parameter.name for parameter in parameters if parameter.name != "help" and not parameter.help] == []


def test_the_reference_page_is_the_programs_own() -> None:
    page = (SOURCE.parent / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert gen_docs.render(page) == page, "run `make docs`"
    assert all(f"### `{path}`" in page for path in WANTED)
    assert all(f"| {code.value} | {code.meaning} |" in page for code in ExitCode)


def test_without_a_command_there_is_help() -> None:
    answer = CliRunner().invoke(program(), [])
    assert "Usage" in answer.output
    assert "submit" in answer.output


def test_version() -> None:
    answer = CliRunner().invoke(program(), ["--version"])
    assert answer.exit_code == 0
    assert answer.output.startswith("holdfast 0.")


@pytest.mark.parametrize("words", [["nonsense"], ["jobs", "list", "--nonsense"], ["jobs", "list", "--state", "odd"]])
def test_a_wrong_call_is_exit_code_2(words: list[str]) -> None:
    assert CliRunner().invoke(program(), words).exit_code == 2
