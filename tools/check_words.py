"""Check that names and prose use the project's vocabulary. Part of `make check`.

`WORDS` and `PHRASES` list what is banned, with what to write instead: words of private metaphors (a job "in line"), and
words with so many meanings that they say nothing. `ALLOWED` lists the exceptions, each with its reason.

Names are the identifiers that a file defines, split at underscores and capitals, and the names of files; in Lua and
SQL, all identifiers. Names that other packages define are not checked. Prose is comments, docstrings, strings and the
names of tests, which are sentences; of other files (Markdown, YAML, shell …) it is the whole text.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).parent.parent

#: What `make check` reads, below the root of the repository.
SCOPE: Final = (
    *("src", "tests", "docs", "examples", "benchmarks", "tools", "ops", "Makefile"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
)
#: These contain the banned words themselves.
EXEMPT: Final = (
    *("tools/check_words.py", "tests/tools/test_check_words.py"),
    # Stores of the previous version, with its names.
    *("tests/engine/sqlite/data/*", "tests/engine/redis/test_previous_version.py", "tests/ledger/test_migrations.py"),
)


class Checked(Enum):
    """Where a word is banned."""

    #: As a part of a name; the word is ordinary English in prose.
    NAMES = "names"
    #: As a whole name; compounds like `last_seen` say enough.
    WHOLE_NAMES = "whole names"
    #: As a part of a name and as a word in prose.
    ALL = "names and prose"
    #: Nowhere: the word is right for some things, and only a reader can tell for which. `use` says when to avoid it.
    NOTHING = "nothing"


class Word(NamedTuple):
    #: All forms that are banned, separated by spaces.
    forms: str
    checked: Checked
    #: What to write, by meaning.
    use: str


class Phrase(NamedTuple):
    #: A regular expression; a space matches any white space, so a phrase may continue on the next line.
    pattern: str
    use: str


class Allowed(NamedTuple):
    #: Forms of words, separated by spaces, or the pattern of a phrase.
    banned: str
    #: Files, as a glob below the root.
    files: str
    #: A regular expression; its match in the name or the prose must contain the word.
    text: str
    reason: str

    def applies_to(self, banned: str, path: str) -> bool:
        """Whether it is about this form or phrase, in this file."""
        return (self.banned == banned or banned in self.banned.split()) and fnmatchcase(path, self.files)


class Finding(NamedTuple):
    path: str
    line: int
    found: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found}; write {self.use}"


ALL: Final = Checked.ALL
NAMES: Final = Checked.NAMES
WHOLE: Final = Checked.WHOLE_NAMES
NOTHING: Final = Checked.NOTHING

WORDS: Final = (
    # Metaphors: an office, the post, a meeting of people.
    Word("desk desks office offices", ALL, "submitter, batcher, queries, operations"),
    Word("door doors", ALL, "portal, handle, client"),
    Word("letter letters", ALL, "dead letter"),
    Word(
        "postman postmark courier registrar archivist",
        ALL,
        "webhook worker, webhook policy, dispatcher, delivery, pruner",
    ),
    Word("seal seals sealed stamped", ALL, "signature, policy"),
    Word("errand errands overseer guardian guardians", ALL, "work item, operator, reaper"),
    Word("bell bells tide tides", ALL, "event, ledger watch"),
    Word("seat seats seated seating", ALL, "lane assignment"),
    Word("nudge nudges nudged nudging", ALL, "wake"),
    Word("hurry hurries hurried hurrying", ALL, "urgent, stop now, expedite"),
    Word("bury buries buried burying", ALL, "dead-letter"),
    Word("stray strays astray", ALL, "orphan, detached"),
    Word("deed deeds", ALL, "audit entry"),
    Word("story stories", ALL, "history, events"),
    Word("survey surveys surveyed", ALL, "snapshot"),
    Word("wish wishes wished", ALL, "request, reservation, filter, options"),
    Word("consent consents", ALL, "approval"),
    Word("farewell", ALL, "deregister, close"),
    Word("patience patient patiently", ALL, "timeout, probe, outage"),
    Word("hopeless misfit misfits undecided", ALL, "permanent, invalid, in doubt, pending"),
    Word("complaint complaints", ALL, "log throttle, problem"),
    Word("blot blots blotted", ALL, "mask, redact"),
    Word("admit admits admitted admission", ALL, "review, reopen intake"),
    Word("struck", ALL, "fault result"),
    Word("news sight", ALL, "notification, new events, gauges"),
    # Subjects without a name.
    Word(
        "somebody someone nobody everybody everyone anybody anyone whoever",
        ALL,
        "operator, principal, caller, worker, or no subject",
    ),
    Word("people person persons", ALL, "operator, principal, approver"),
    # Personification.
    Word("told tell tells telling", ALL, "notify, log, confirm, report"),
    Word("forget forgets forgot forgotten", ALL, "trim, deregister, release, drop"),
    Word("remember remembers remembered remind reminds reminded", ALL, "record, restore"),
    Word("anew", ALL, "again"),
    Word("beside", ALL, "besides, next to, compared with"),
    # Ordinary English in prose; as names they say too little.
    Word("place places", NAMES, "position, cursor, location, path, file"),
    Word("line lines", NAMES, "stream, ready, entry, pending calls"),
    Word("ask asks asked question questions", NAMES, "approval request, read, request, prompt"),
    Word("cut cuts", NAMES, "snapshot, truncate, disconnect"),
    Word("turn turns", NAMES, "fair share, round, pass"),
    Word("look looks looked", NAMES, "check, read, get"),
    Word("ring rings", NAMES, "buffer, event, wake"),
    Word("cover covers covered hide hides", NAMES, "codec, encode, decode, mask"),
    Word("stamp stamps", NAMES, "policy, version, timestamp"),
    Word("retake retaken", NAMES, "claim due retries"),
    Word("room rooms", NAMES, "free slots, capacity, sandbox"),
    Word("stage stages", NAMES, "fixture, step"),
    Word("bench benches", NAMES, "rig, debug runner, benchmark"),
    Word("hand hands", NAMES, "audit, control"),
    Word("away trouble", NAMES, "unreachable, failing"),
    Word("wanted", NAMES, "filter, expected, required"),
    Word("take takes taken took leave leaves", WHOLE, "claim, reclaim, read, deregister, remove"),
    Word("said heard seen held why came whom", WHOLE, "what the value is: reply, reason, in_flight, result"),
    # Right for some things.
    Word("show shows shown", NOTHING, "encode, decode; right for the commands `… show` and for output"),
    Word("action actions", NOTHING, "audit entry; right for what an operator does, and for an effect"),
    Word("incarnation", NOTHING, "epoch, of an engine; right for one start of a worker"),
    Word("hold holds", NOTHING, "lease; right for the option `hold` and for approvals"),
    Word("left", NOTHING, "remaining; right for what is left over"),
    Word("known", NOTHING, "recorded; right for keys and names"),
)

PHRASES: Final = (
    Phrase(r"in line", "ready"),
    Phrase(r"in hand", "in flight"),
    Phrase(r"(?:go|goes|going|gone|went) on", "continue"),
    Phrase(r"(?:give|gives|given|giving|gave) up", "dead-letter, release, abandon"),
    Phrase(r"(?:hand|hands|handed|handing) (?:over|in)", "submit, pass"),
    Phrase(
        r"(?<!there\s)(?:is|are|was|were) no (?!longer|more|less|fewer|later|earlier|older|newer|larger)\w+",
        "is not a …",
    ),
    Phrase(r"(?<!there\s)(?:is|are|was|were) (?-i:none)", "there are no …"),
    Phrase(r"so many(?! \w+ that)", "N, or the number"),
    Phrase(r"such as", "for example, like"),
    Phrase(r"as many\b[^.;:]*? may be", "the limit"),
    Phrase(
        r"of (?:its|our|their|your|my) own(?=\W*$|[^\w\s]|\s+(?:and|at|but|for|has|in|is|on|or|that|to|which|with)\b)",
        "own, separate",
    ),
    Phrase(r"once more|again and again", "again, repeatedly"),
    Phrase(r"(?:is|are|was|were) well again|in trouble", "recovered, failing"),
    Phrase(r"(?:take|takes|took|taking|taken) leave", "deregister"),
    Phrase(r"whose memory|lost (?:its|their) memory", "epoch, lost data"),
    Phrase(r"what (?:came|comes|becomes|became|has become) of", "the outcome of"),
)

ALLOWED: Final = (
    # Words of the field.
    Allowed("letter letters", "*", r"(?i)dead[- _\n]*letters?", "a dead letter is the word for it"),
    Allowed("letters", "*", r"letters, digits", "letters of the alphabet"),
    Allowed("person", "*", r"(?:another|the same) person", "two-person rule: it is about persons, not tokens"),
    Allowed("letters", "tests/*", r"ascii_letters", "a name of the standard library"),
    Allowed("seal", "tests/webhooks/test_forgery.py", r"seal", "a field of the previous version"),
    Allowed("struck", "tests/verification/chaos/*", r"struck", "a key of the report of `holdfast chaos`"),
    Allowed("line lines", "src/holdfast/cli/*", r".*", "lines of text on a terminal"),
    Allowed("line lines", "src/holdfast/verification/*", r".*", "lines of text of a process or a file"),
    Allowed("line lines", "src/holdfast/http/*", r".*", "lines of text of an example"),
    Allowed("line lines", "src/holdfast/observe/log_formats.py", r".*", "lines of a log"),
    Allowed("line lines", "src/holdfast/core/states.py", r".*", "lines of a diagram"),
    Allowed("lines", "src/holdfast/execution/invoke.py", r".*", "lines of a traceback"),
    Allowed("line", "src/holdfast/engine/redis/*.py", r"line", "lines of a reply to INFO"),
    Allowed("line", "src/holdfast/engine/sqlite/schema.py", r"line", "lines of a script"),
    Allowed("line lines", "tools/*", r".*", "lines of text"),
    Allowed("line lines", "benchmarks/*", r".*", "lines of text of a process or a page"),
    Allowed("held", "src/holdfast/testing/*", r"held", "a job that was submitted with hold=True"),
    Allowed("held", "src/holdfast/observe/counters.py", r"held", "the metric _jobs_held_total (M1)"),
    Allowed(
        "held", "src/holdfast/triggers/*", r"held", "messages on hold while a dependency is down; shown by the API"
    ),
    Allowed("ask", "src/holdfast/engine/redis/net/*", r"is_ask", "the redirect ASK of Redis Cluster"),
    Allowed("stage", "src/holdfast/triggers/message_handler.py", r"stage", "a field of structured logs"),
    Allowed("stage", "examples/workflow_apply/*", r"stage_id", "a stage of a workflow; the API of the source document"),
    Allowed("stage stages", "benchmarks/*", r".*", "a stage of a benchmark run; an option of the command line"),
    Allowed("stamp stamps stamped", "benchmarks/*", r".*", "a timestamp of a step"),
    Allowed("stamp", "tools/pythons.py", r"stamp", "a stamp file, as make has them"),
    Allowed("seen", "tools/packages.py", r"seen", "visited nodes of a graph"),
    # Names fixed by requirements, by the public API or by stored data.
    Allowed("seen", "src/holdfast/webhooks/signature.py", r"seen", "a public parameter of `verify`"),
    Allowed("seen", "src/holdfast/verification/acceptance/*", r"seen", "a field of `verify --json`"),
    Allowed("said", "src/holdfast/verification/chaos/load.py", r"said", "a field of the journal"),
    Allowed("struck", "src/holdfast/verification/chaos/*", r"struck", "a field of `chaos --json`"),
    Allowed("forgotten", "src/holdfast/verification/chaos/*", r"\w*forgotten\w*", "fields of `chaos --json`"),
    Allowed(
        "cut", "src/holdfast/verification/chaos/*", r"(?i)_?cut", "a fault that cuts connections; its name in reports"
    ),
    Allowed("hand", "src/holdfast/verification/chaos/parts.py", r"HAND_OVER", "a fault: a planned fail-over"),
    Allowed("hand", "benchmarks/failover.py", r"hand_over", "an option of the command line"),
    Allowed(r"(?:hand|hands|handed|handing) (?:over|in)", "*", r"(?i)hand-over", "a fault: a planned fail-over"),
    Allowed(
        "people", "src/holdfast/verification/chaos/operators.py", r":people", "part of a seed: runs can be repeated"
    ),
    Allowed("ask asked", "src/holdfast/verification/*", r"ask(?:ed)?", "names of tasks"),
    Allowed("wanted", "benchmarks/endurance/*", r"wanted_per_s", "a field of stored results"),
    Allowed("remind", "src/holdfast/demo/*", r"remind", "a task that reminds a customer"),
    Allowed("remembers", "*", r"(?i)ledger[- ]remembers", "title of decision 1"),
    Allowed("bench", "src/holdfast/testing/contract/*", r"bench", "a fixture that the suites of brokers define"),
    # Names that earlier versions have written.
    Allowed("told hurry", "src/holdfast/engine/redis/feed_*.py", r"told|hurry", "entries of the previous version"),
    Allowed("consents", "tests/fuzz/corpus.py", r"consents", "JSON of the previous version"),
    Allowed("consent consents", "src/holdfast/core/job.py", r"consents?", "JSON of the previous version"),
    Allowed("told hurry person", "src/holdfast/engine/sqlite/ledger_schema.py", r"\w+", "columns of earlier versions"),
    Allowed("told person", "src/holdfast/ledger/migrations/versions/*", r"\w+", "columns of earlier versions"),
    Allowed("seal", "src/holdfast/worker/webhook_worker.py", r"seal", "argument of jobs of the previous version"),
    Allowed("letters person consent consents admission", "CHANGELOG.md", r"`[\w.]+`", "former names"),
)

#: Text files; all of their text is prose.
_TEXT: Final = (".md", ".yml", ".yaml", ".toml", ".sh", ".mako", ".json", "")
_SUFFIXES: Final = (".py", ".lua", ".sql", ".md", ".yml", ".yaml", ".toml", ".sh", ".mako")
_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_BY_FORM: Final = {form: word for word in WORDS for form in word.forms.split() if word.checked in (ALL, NAMES)}
_WHOLE: Final = {form: word for word in WORDS for form in word.forms.split() if word.checked is WHOLE}
_PROSE_FORMS: Final = "|".join(form for word in WORDS if word.checked is ALL for form in word.forms.split())
_PROSE_WORD: Final = re.compile(rf"(?<![A-Za-z])(?:{_PROSE_FORMS})(?![a-z])", re.IGNORECASE)
#: Between the words of a phrase there may be a line break, and the mark of a comment on the next line.
_GAP: Final = r"[\s#*-]+"
_PHRASES: Final = [
    (re.compile(r"\b(?:" + phrase.pattern.replace(" ", _GAP) + r")(?!\w)", re.IGNORECASE), phrase) for phrase in PHRASES
]
#: The same in source text, where strings may be continued in another literal. Files without a match have no such prose.
_RAW_PHRASE: Final = re.compile(
    "|".join(rf"\b(?:{phrase.pattern})(?!\w)".replace(" ", r"[^\w]+(?:f[\"'])?") for phrase in PHRASES), re.IGNORECASE
)
#: By far the most common exception.
_DEAD_LETTER: Final = re.compile(r"dead[- _]*letters?", re.IGNORECASE)
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*")
_LUA: Final = re.compile(
    r"""(?P<prose>--[^\n]*(?:\n[ \t]*--[^\n]*)*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<name>[A-Za-z_]\w*)"""
)
_SQL: Final = re.compile(r"""(?P<prose>--[^\n]*(?:\n[ \t]*--[^\n]*)*|'(?:''|[^'])*')|(?P<name>[A-Za-z_]\w*)""")


class _Text(NamedTuple):
    """A piece of a file: one name, or some prose."""

    line: int
    text: str
    is_name: bool


class Checker:
    """Checks files, and records which exceptions were needed."""

    def __init__(self, allowed: Sequence[Allowed] = ALLOWED) -> None:
        self._allowed = allowed
        self._used: set[Allowed] = set()

    def check(self, root: Path, scope: Sequence[str], exempt: Sequence[str] = ()) -> list[Finding]:
        """Every banned word and phrase in the files of `scope`, except those that are allowed."""
        findings: list[Finding] = []
        for path in _files(root, scope):
            relative = path.relative_to(root).as_posix()
            if not any(fnmatchcase(relative, pattern) for pattern in exempt):
                findings += self.check_file(relative, path.read_text(encoding="utf-8"))
        return findings

    def check_file(self, path: str, source: str) -> list[Finding]:
        """The findings of one file. `path` is relative to the root of the repository."""
        findings: list[Finding] = []
        for piece in _pieces(path, source):
            findings += self._check_name(path, piece) if piece.is_name else self._check_prose(path, piece)
        return findings

    def unused(self) -> list[Allowed]:
        """Exceptions that no file needed so far."""
        return [entry for entry in self._allowed if entry not in self._used]

    def _check_name(self, path: str, piece: _Text) -> Iterator[Finding]:
        bare = piece.text.strip("_").lower()
        found = [(part, _BY_FORM[part], start, end) for part, start, end in _split(piece.text) if part in _BY_FORM]
        if bare in _WHOLE:
            found.append((bare, _WHOLE[bare], 0, len(piece.text)))
        for form, word, start, end in found:
            # What a test's locals stand for depends on the test: a held job, a port that is taken.
            if path.startswith("tests/") and word.checked is not Checked.ALL:
                continue
            if not self._is_allowed(form, path, piece.text, start, end):
                yield Finding(path, piece.line, f"name {piece.text!r} contains {form!r}", word.use)

    def _check_prose(self, path: str, piece: _Text) -> Iterator[Finding]:
        for match in _PROSE_WORD.finditer(piece.text):
            form = match.group().lower()
            yield from self._report(path, piece, match, form, _BY_FORM[form].use)
        for pattern, phrase in _PHRASES:
            for match in pattern.finditer(piece.text):
                yield from self._report(path, piece, match, phrase.pattern, phrase.use)

    def _report(self, path: str, piece: _Text, match: re.Match[str], banned: str, use: str) -> Iterator[Finding]:
        if not self._is_allowed(banned, path, piece.text, *match.span()):
            found = re.sub(rf"{_GAP}", " ", match.group())
            line = piece.line + piece.text.count("\n", 0, match.start())
            yield Finding(path, line, f"prose contains {found!r}", use)

    def _is_allowed(self, banned: str, path: str, text: str, start: int, end: int) -> bool:
        """Whether an exception covers this part of the text."""
        for entry in self._allowed:
            if entry.applies_to(banned, path) and any(
                found.start() <= start and end <= found.end() for found in re.finditer(entry.text, text)
            ):
                self._used.add(entry)
                return True
        return False


@cache
def _split(name: str) -> tuple[tuple[str, int, int], ...]:
    """The words of a name, and where each starts and ends: `_DeadLetter` has dead and letter."""
    return tuple((part.group().lower(), *part.span()) for part in _PART.finditer(name))


def _files(root: Path, scope: Sequence[str]) -> Iterator[Path]:
    for name in scope:
        path = root / name
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; correct the scope")
        yield from [path] if path.is_file() else sorted(each for each in path.rglob("*") if _is_checked(each))


def _is_checked(path: Path) -> bool:
    if not path.is_file() or "__pycache__" in path.parts:
        return False
    # Of JSON only the dashboards have prose.
    return path.suffix in _SUFFIXES or path.match("grafana/*.json")


def _pieces(path: str, source: str) -> Iterator[_Text]:
    suffix = Path(path).suffix
    if suffix in _TEXT:
        yield _Text(1, source, is_name=False)
        return
    yield _Text(1, Path(path).stem, is_name=True)
    if suffix == ".py":
        yield from _python_pieces(source)
    else:
        yield from _script_pieces(_LUA if suffix == ".lua" else _SQL, source)


def _script_pieces(grammar: re.Pattern[str], source: str) -> Iterator[_Text]:
    """Names and prose of Lua or SQL. Each name counts once."""
    names: set[str] = set()
    for match in grammar.finditer(source):
        name = match.group("name")
        if name not in names:
            yield _Text(source.count("\n", 0, match.start()) + 1, match.group(), is_name=name is not None)
        if name is not None:
            names.add(name)


def _python_pieces(source: str) -> Iterator[_Text]:
    text = _DEAD_LETTER.sub("", source)
    has_prose = _PROSE_WORD.search(text) is not None or _RAW_PHRASE.search(text) is not None
    # Parsing is slow, and most files have nothing to find.
    if not has_prose and not any(_is_suspect(name) for name in set(_IDENTIFIER.findall(source))):
        return
    for node in ast.walk(ast.parse(source)):
        for name in _defined_names(node):
            # The name of a test is a sentence.
            is_test = name.startswith("test_")
            text = name.replace("_", " ") if is_test else name
            yield _Text(node.lineno, text, is_name=not is_test)  # type: ignore[attr-defined]
        if not has_prose:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _Text(node.lineno, node.value, is_name=False)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            yield _Text(node.lineno, node.value.decode("latin-1"), is_name=False)
    if has_prose:
        yield from _comments(source)


@cache
def _is_suspect(name: str) -> bool:
    name = _DEAD_LETTER.sub("", name)
    return name.strip("_").lower() in _WHOLE or any(part in _BY_FORM for part, _, _ in _split(name))


def _defined_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name


def _comments(source: str) -> Iterator[_Text]:
    """Comments; those on consecutive lines are one piece, because a phrase may continue on the next line."""
    first = 0
    lines: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if lines and line != first + len(lines):
            yield _Text(first, "\n".join(lines), is_name=False)
            lines = []
        first = first if lines else line
        lines.append(token.string)
    if lines:
        yield _Text(first, "\n".join(lines), is_name=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="what to check instead of the default scope")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository")
    options = parser.parse_args(arguments)
    scope = options.paths or SCOPE
    checker = Checker()
    problems = [str(finding) for finding in checker.check(options.root, scope, EXEMPT)]
    if not options.paths:
        problems += [
            f"exception for {entry.banned!r} in {entry.files} is not used; remove it" for entry in checker.unused()
        ]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
