"""Check that names and prose use the project's vocabulary. Part of `make check`.

Banned words are those of private metaphors (a job "in line", a "desk" for jobs) and words with several meanings, for which
the field has better ones. `WORDS` and `PHRASES` list them with what to write instead; `ALLOWED` lists the exceptions.

Names are the identifiers that a file defines, split at underscores and capitals, and the names of files. Uses of names that
other packages define are not checked. Prose is all comments, docstrings and strings, and whole Markdown pages.
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
    "src",
    "docs",
    "examples",
    "benchmarks",
    "tools",
    "ops",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
#: Whether it reads `tests` as well.
CHECK_TESTS: Final = False
#: Files that are being rewritten on another branch. Empty this after the merge.
EXEMPT: Final = (
    "src/holdfast/app.py",
    "src/holdfast/client/*",
    "src/holdfast/worker/worker.py",
    "src/holdfast/engine/port/*",
    "docs/explanation/architecture.md",
)


class Checked(Enum):
    """Where a word is banned."""

    #: As a part of a name; the word is ordinary English in prose.
    NAMES = "names"
    #: As a whole name; compounds such as `last_seen` say enough.
    WHOLE_NAMES = "whole names"
    #: As a part of a name and as a word in prose.
    ALL = "names and prose"


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
    #: The form of the word, or the pattern of the phrase.
    banned: str
    #: Files, as a glob below the root.
    files: str
    #: A regular expression that a name has to match, or that has to match prose around the word.
    text: str
    reason: str


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
    Word("said heard looked seen held why came whom", WHOLE, "what the value is: reply, reason, in_flight, result"),
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
    Phrase(r"(?:so|such) (?:many|as)(?! as)", "N, for example"),
    Phrase(r"as many\b[^.;:]*? may be", "the limit"),
    Phrase(r"of (?:its|our|their|your|his|my|one's) own", "own, separate"),
    Phrase(r"once more|again and again", "again, repeatedly"),
    Phrase(r"(?:is|are|was|were) well again|in trouble", "recovered, failing"),
    Phrase(r"(?:take|takes|took|taking|taken) leave", "deregister"),
    Phrase(r"whose memory|lost (?:its|their) memory", "epoch, lost data"),
    Phrase(r"what (?:came|comes|becomes|became|has become) of", "the result of"),
)

ALLOWED: Final = (
    Allowed("letter", "**", r"(?i)dead[- _]?letter", "a dead letter is the word for it"),
    Allowed("letters", "**", r"(?i)dead[- _]?letters", "a dead letter is the word for it"),
)

_SUFFIXES: Final = (".py", ".lua", ".sql", ".md")
_PART: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_BY_FORM: Final = {form: word for word in WORDS for form in word.forms.split() if word.checked is not WHOLE}
_WHOLE: Final = {form: word for word in WORDS for form in word.forms.split() if word.checked is WHOLE}
_PROSE_WORD: Final = re.compile(
    rf"(?<![A-Za-z])(?:{'|'.join(form for word in WORDS if word.checked is ALL for form in word.forms.split())})(?![a-z])",
    re.IGNORECASE,
)
#: Between the words of a phrase there may be a line break, and the mark of a comment on the next line.
_GAP: Final = r"[\s#*-]+"
_PHRASES: Final = [
    (re.compile(r"\b(?:" + phrase.pattern.replace(" ", _GAP) + r")\b", re.IGNORECASE), phrase) for phrase in PHRASES
]
_LUA: Final = re.compile(
    r"""(?P<prose>--[^\n]*(?:\n[ \t]*--[^\n]*)*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<name>[A-Za-z_]\w*)"""
)
_SQL: Final = re.compile(r"""(?P<prose>--[^\n]*(?:\n[ \t]*--[^\n]*)*|'(?:''|[^'])*')|(?P<name>[A-Za-z_]\w*)""")


class _Text(NamedTuple):
    """A piece of a file: one name, or some prose."""

    line: int
    text: str
    is_name: bool


def find_banned_words(root: Path, scope: Sequence[str], exempt: Sequence[str] = ()) -> list[Finding]:
    """Every banned word and phrase in the files of `scope`, except those that are allowed."""
    findings: list[Finding] = []
    for path in _files(root, scope):
        relative = path.relative_to(root).as_posix()
        if not any(fnmatchcase(relative, pattern) for pattern in exempt):
            findings += check_file(relative, path.read_text(encoding="utf-8"))
    return findings


def check_file(path: str, source: str) -> list[Finding]:
    """The findings of one file. `path` is relative to the root of the repository."""
    findings: list[Finding] = []
    for piece in _pieces(path, source):
        check = _check_name if piece.is_name else _check_prose
        findings += check(path, piece)
    return findings


def _check_name(path: str, piece: _Text) -> Iterator[Finding]:
    bare = piece.text.strip("_").lower()
    found = [(part, _BY_FORM[part], start, end) for part, start, end in _split(piece.text) if part in _BY_FORM]
    if bare in _WHOLE:
        found.append((bare, _WHOLE[bare], 0, len(piece.text)))
    for form, word, start, end in found:
        if not _is_allowed(form, path, piece.text, start, end):
            yield Finding(path, piece.line, f"name {piece.text!r} contains {form!r}", word.use)


def _check_prose(path: str, piece: _Text) -> Iterator[Finding]:
    for match in _PROSE_WORD.finditer(piece.text):
        form = match.group().lower()
        yield from _report(path, piece, match, form, _BY_FORM[form].use)
    for pattern, phrase in _PHRASES:
        for match in pattern.finditer(piece.text):
            yield from _report(path, piece, match, phrase.pattern, phrase.use)


def _report(path: str, piece: _Text, match: re.Match[str], banned: str, use: str) -> Iterator[Finding]:
    if not _is_allowed(banned, path, piece.text, *match.span()):
        found = re.sub(r"[\s#*-]+", " ", match.group())
        yield Finding(path, piece.line + piece.text.count("\n", 0, match.start()), f"prose contains {found!r}", use)


def _is_allowed(banned: str, path: str, text: str, start: int, end: int) -> bool:
    """Whether an entry of the allow list covers this part of the text."""
    return any(
        found.start() <= start and end <= found.end()
        for entry in ALLOWED
        if entry.banned == banned and fnmatchcase(path, entry.files)
        for found in re.finditer(entry.text, text)
    )


@cache
def _split(name: str) -> tuple[tuple[str, int, int], ...]:
    """The words of a name, and where each starts and ends: `_DeadLetter` has dead and letter."""
    return tuple((part.group().lower(), *part.span()) for part in _PART.finditer(name))


def _files(root: Path, scope: Sequence[str]) -> Iterator[Path]:
    for name in scope:
        path = root / name
        yield from [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES)


def _pieces(path: str, source: str) -> Iterator[_Text]:
    suffix = Path(path).suffix
    if suffix == ".md":
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
    for node in ast.walk(ast.parse(source)):
        for name in _defined_names(node):
            yield _Text(node.lineno, name, is_name=True)  # type: ignore[attr-defined]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield _Text(node.lineno, node.value, is_name=False)
    yield from _comments(source)


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
    parser.add_argument("--tests", action="store_true", help="check tests as well")
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository")
    options = parser.parse_args(arguments)
    scope = options.paths or [*SCOPE, *(["tests"] if options.tests or CHECK_TESTS else [])]
    findings = find_banned_words(options.root, scope, () if options.paths else EXEMPT)
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
