"""The pages are complete (members of public classes, codes, alerts) and name nothing that does not exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main
import yaml

import holdfast
from holdfast import Context, Deny, GuardRequest, Holdfast, Job, RequireApproval, Retry, Task, Worker
from holdfast.cli.program import program
from holdfast.client.connections import LedgerClient
from holdfast.client.options import SubmitOptions
from holdfast.environment import SECRETS
from holdfast.guard.registry import GuardRegistry
from holdfast.outbox.writer import Outbox
from holdfast.settings import Settings
from tools.cli_reference import walk

ROOT: Final = Path(__file__).resolve().parents[2]
PYTHON_PAGE: Final = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
CODES_PAGE: Final = (ROOT / "docs" / "reference" / "failure-codes.md").read_text(encoding="utf-8")
#: Pages for users, which describe the current release.
PAGES: Final = [
    ROOT / "README.md",
    *(
        page
        for folder in ("how-to", "reference", "explanation", "tutorial")
        for page in (ROOT / "docs" / folder).glob("*.md")
    ),
]

#: Public by name, but internal to holdfast.
INTERNAL: Final[dict[type, frozenset[str]]] = {
    Task: frozenset({"spec"}),
    Context: frozenset({"begun"}),
    Worker: frozenset(
        {"on_leases_lost", "on_cancelled", "on_control_changed", "on_due", "on_replaced", "incarnation", "status"}
    ),
    GuardRegistry: frozenset({"judge"}),
}


def attributes(kind: type) -> Iterator[str]:
    """Yield methods, properties, and attributes that the class and its bases assign."""
    for base in kind.__mro__:
        if not base.__module__.startswith("holdfast"):
            continue
        yield from vars(base)
        for node in ast.walk(ast.parse(inspect.getsource(base))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def members(kind: type) -> set[str]:
    return {name for name in attributes(kind) if not name.startswith("_")} - INTERNAL.get(kind, frozenset())


def parameters(function: Any) -> set[str]:
    all_parameters = inspect.signature(function).parameters.values()
    return {one.name for one in all_parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)} - {"self"}


def fields(kind: type) -> set[str]:
    return set(inspect.get_annotations(kind))


def section(heading: str) -> str:
    """Return the section of the Python page with this heading."""
    found = re.search(rf"^## .*{re.escape(heading)}.*?(?=^## |\Z)", PYTHON_PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"there is no section {heading}"
    return found[0]


def code_words(text: str) -> set[str]:
    """Return the names inside `code` spans and code blocks."""
    without_blocks = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\w+", " ".join([*re.findall(r"`([^`]+)`", without_blocks), *blocks])))


NAMED: Final[dict[str, tuple[str, set[str]]]] = {
    "Holdfast": ("`Holdfast(", members(Holdfast) | (parameters(Holdfast.__init__) - {"overrides"})),
    "task options": ("`@app.task`", parameters(inspect.unwrap(Holdfast.task)) - {"function"}),
    "Retry": ("`Retry(", parameters(Retry.__init__)),
    "submit options": ("Submitting", fields(SubmitOptions)),
    "Task": ("Submitting", members(Task)),
    "Job": ("`Job`", members(Job)),
    "Context": ("`Context`", members(Context)),
    "Guards": ("`app.guard`", members(GuardRegistry) | parameters(GuardRegistry.rule)),
    "RequireApproval": ("`app.guard`", fields(RequireApproval)),
    "Deny": ("`app.guard`", fields(Deny)),
    "GuardRequest": ("`app.guard`", fields(GuardRequest)),
    "Approval": ("`Context`", {"approval_id", "by", "at_ms", "reason"}),
    "Outbox": ("`app.outbox`", members(Outbox) | parameters(Outbox.add)),
    "ledger": ("`app.ledger`", members(LedgerClient)),
    "Worker": ("`Worker(", members(Worker) | (parameters(Worker.__init__) - {"app"})),
}


@pytest.mark.parametrize("name", NAMED)
def test_the_python_page_names_all_members_and_parameters(name: str) -> None:
    heading, expected = NAMED[name]
    assert expected, name
    assert sorted(expected - code_words(section(heading))) == []


def test_the_python_page_names_all_public_imports() -> None:
    assert sorted(set(holdfast.__all__) - {"__version__"} - code_words(PYTHON_PAGE)) == []


@pytest.mark.parametrize("kind", INTERNAL, ids=lambda kind: kind.__name__)
def test_undocumented_members_exist(kind: type) -> None:
    assert set(attributes(kind)) >= INTERNAL[kind]


# Codes ---------------------------------------------------------------------------------------------

_CODE: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
#: Not codes: settings, names of SQLite, Kafka and `os.sysconf`.
_FOREIGN: Final = ("HOLDFAST_", "SQLITE_", "SASL_", "SC_")
#: Metavars of the command line.
_METAVARS: Final = {"DLQ_ID"}


def test_every_code_in_the_sources_is_on_the_page() -> None:
    literals = {
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CODE.fullmatch(node.value)
    }
    codes = {text for text in literals if not text.startswith(_FOREIGN)} - _METAVARS | {"HOLDFAST_ERROR"}
    assert "JOB_FAILED" in codes
    assert sorted(codes - set(re.findall(r"^\| `(\w+)`", CODES_PAGE, re.MULTILINE))) == []


# Numbers and commands in prose ---------------------------------------------------------------------

_NUMBER_WORDS: Final = (
    *("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen"),
    *("fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_NUMBERS: Final = {word: number for number, word in enumerate(_NUMBER_WORDS, start=2)}


def test_pages_state_the_right_number_of_alerts() -> None:
    rules = yaml.safe_load((ROOT / "ops" / "prometheus" / "rules.yml").read_text(encoding="utf-8"))
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    stated = {
        (page.name, _NUMBERS.get(word.lower()) or int(word))
        for page in PAGES
        for word in re.findall(
            rf"\b({'|'.join(_NUMBERS)}|\d+) alerts\b", page.read_text(encoding="utf-8"), re.IGNORECASE
        )
    }
    assert stated == {("monitor.md", len(alerts))}


def test_no_page_says_that_a_command_is_not_implemented() -> None:
    stale = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
        if re.search(r"\bno command\b.*\byet\b|not (implemented|built|supported) yet", line)
    ]
    assert stale == []


#: Not settings: a code, and variables that Kubernetes sets and holdfast ignores.
_OTHER_VARIABLES: Final = frozenset(
    {"HOLDFAST_ERROR", "HOLDFAST_PORT", "HOLDFAST_PORT_8080_TCP", "HOLDFAST_SERVICE_HOST"}
)
#: A command line in a code span or block: `holdfast` and the rest of the line.
_CALL: Final = re.compile(r"(?:^|[`$(&|]|=\s?)\s*holdfast ((?:[\w-]+)(?:[^`\n|&#;)]*))", re.MULTILINE)
_SHARED: Final = {"--help", "-h", "--version"}


def test_every_command_and_option_on_a_page_exists() -> None:
    options = {
        path.removeprefix("holdfast "): {
            option for one in command.params for option in (*one.opts, *one.secondary_opts)
        }
        for path, command in walk(typer.main.get_command(program()), "holdfast")
    }
    wrong = []
    for page in PAGES:
        for call in _CALL.findall(_code(page.read_text(encoding="utf-8"))):
            arguments = call.split()
            if ". " in call:
                # A sentence that starts with the name.
                continue
            name = next((name for name in (" ".join(arguments[:2]), arguments[0]) if name in options), None)
            if name is None:
                if not (len(arguments) == 1 and any(path.startswith(f"{arguments[0]} ") for path in options)):
                    wrong.append(f"{page.name}: holdfast {call}")
                continue
            used = {word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--"}
            wrong += [f"{page.name}: holdfast {call}: no {option}" for option in used - options[name] - _SHARED]
    assert wrong == []


def _code(text: str) -> str:
    """Return code spans and blocks, each on separate lines."""
    blocks = re.findall(r"^```(?:sh|text)?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    (.+)$", text, re.MULTILINE)
    return "\n".join([*blocks, *indented, *re.findall(r"`([^`\n]+)`", text)])


def test_every_setting_on_a_page_exists() -> None:
    known = {f"HOLDFAST_{name.upper()}" for name in Settings.model_fields}
    known |= {f"HOLDFAST_{name.upper()}_FILE" for name in SECRETS}
    named = {
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"\bHOLDFAST_[A-Z0-9_]*[A-Z0-9]\b", page.read_text(encoding="utf-8"))
    }
    assert sorted(one for one in named if one[1] not in known and one[1] not in _OTHER_VARIABLES) == []


def test_every_target_of_the_audit_log_is_in_its_table() -> None:
    targets = {
        str(keyword.value.value)
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "AuditEntry"
        for keyword in node.keywords
        if keyword.arg == "target" and isinstance(keyword.value, ast.Constant)
    }
    assert {"job", "queue", "dlq"} <= targets
    page = (ROOT / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    assert sorted(targets - set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))) == []


def test_every_package_is_in_the_architecture() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    packages = {path.parent.name for path in (ROOT / "src" / "holdfast").glob("*/__init__.py")}
    named = set(re.findall(r"`holdfast\.(\w+)`", page))
    assert sorted(packages - named) == []
    assert [name for name in named if importlib.util.find_spec(f"holdfast.{name}") is None] == []
