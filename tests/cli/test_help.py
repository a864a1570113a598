"""Help and reference: every command has examples that parse, and the page in docs/ is up to date."""

from __future__ import annotations

import re
import shlex
from typing import Any, cast

import click
import pytest
import typer.main
from typer.testing import CliRunner

from holdfast.cli.command import ExitCode
from holdfast.cli.program import program
from tests.cli.harness import SOURCE
from tools import gen_docs
from tools.cli_reference import examples, walk

#: A call in a code block, indented or fenced, up to a comment.
_CALL = re.compile(r"^(holdfast .*?)(?:\s{2,}#.*)?$", re.MULTILINE)
_CODE = re.compile(r"^```sh\n(.*?)^```$|^ {4}([^\n]*)$", re.MULTILINE | re.DOTALL)


def find_calls_in_the_docs() -> dict[str, list[str]]:
    """Every call of the program in README and docs, by page."""
    calls: dict[str, list[str]] = {}
    for page in [SOURCE.parent / "README.md", *sorted((SOURCE.parent / "docs").rglob("*.md"))]:
        for fenced, indented in _CODE.findall(page.read_text(encoding="utf-8")):
            calls.setdefault(str(page.relative_to(SOURCE.parent)), []).extend(_CALL.findall(fenced or indented))
    return calls


ROOT = typer.main.get_command(program())
COMMANDS = dict(walk(ROOT, "holdfast"))
EXPECTED = {
    "holdfast demo",
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
    "holdfast workers",
    "holdfast tasks list",
    "holdfast tasks show",
    "holdfast queues list",
    "holdfast queues pause",
    "holdfast queues resume",
    "holdfast queues limit",
    "holdfast queues concurrency",
    "holdfast queues worker-concurrency",
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
    "holdfast trigger replay",
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
READING = EXPECTED - {
    "holdfast demo",
    "holdfast dev",
    "holdfast worker",
    "holdfast upkeep",
    "holdfast serve",
    "holdfast trigger run",
    "holdfast outbox relay",
}


def test_all_commands_exist() -> None:
    assert set(COMMANDS) == EXPECTED


@pytest.mark.parametrize("path", sorted(EXPECTED))
def test_help_has_a_text_and_examples(path: str) -> None:
    words = path.split()[1:]
    answer = CliRunner().invoke(program(words[0]), [*words, "--help"])
    assert answer.exit_code == 0
    assert "Examples" in answer.output
    assert f"{path} " in answer.output or path in answer.output.split("Examples")[1]
    assert COMMANDS[path].help


def test_the_examples_parse() -> None:
    for path, command in COMMANDS.items():
        own = [example for example in examples(command) if example.startswith(path)]
        assert own, path
        for example in own:
            parse(example)


def test_the_calls_in_the_docs_parse() -> None:
    calls = find_calls_in_the_docs()
    assert sum(map(len, calls.values())) > 100
    for page, found in calls.items():
        for call in found:
            try:
                parse(call)
            except click.UsageError as exc:
                raise AssertionError(f"{page}: {call}: {exc.message}") from exc


def parse(call: str) -> None:
    """Check that the parser accepts a call, up to its first shell operator."""
    words = shlex.split(call)
    end = next((index for index, word in enumerate(words) if word in ("|", "<", "&&")), len(words))
    path = next(" ".join(words[:length]) for length in (2, 3) if " ".join(words[:length]) in COMMANDS)
    COMMANDS[path].make_context(path, words[len(path.split()) : end]).close()


def test_every_command_takes_the_shared_options() -> None:
    for path, command in COMMANDS.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert {"--url", "--namespace", "--debug"} <= options, path
        assert "--json" in options or path not in READING, path


def test_every_parameter_has_help() -> None:
    undocumented = [
        f"{path}: {parameter.name}"
        for path, command in COMMANDS.items()
        for parameter in cast("list[Any]", command.params)
        if parameter.name != "help" and not parameter.help
    ]
    assert undocumented == []


def test_the_reference_page_is_up_to_date() -> None:
    page = (SOURCE.parent / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert gen_docs.render(page) == page, "run `make docs`"
    assert all(f"### `{path}`" in page for path in EXPECTED)
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
