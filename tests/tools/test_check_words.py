"""The check of words finds banned words wherever they may be, and accepts what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_words
from tools.check_words import ALLOWED, WORDS, Allowed, Checked, Checker, main

FILE = "src/holdfast/sample.py"


def found(source: str, path: str = FILE) -> list[str]:
    """What is found, without where."""
    return [finding.found for finding in Checker().check_file(path, source)]


@pytest.mark.parametrize(
    ("source", "name", "word"),
    [
        ("class FrontDesk: ...", "FrontDesk", "desk"),
        ("def open_door(): ...", "open_door", "door"),
        ("async def nudge(): ...", "nudge", "nudge"),
        ("def f(person): ...", "person", "person"),
        ("def f(*, is_told=1): ...", "is_told", "told"),
        ("lambda wish: 1", "wish", "wish"),
        ("_BURIED = 1", "_BURIED", "buried"),
        ("seat: int = 1", "seat", "seat"),
        ("for errand in (): ...", "errand", "errand"),
        ("[1 for tide in ()]", "tide", "tide"),
        ("(story := 1)", "story", "story"),
        ("with open('') as bell: ...", "bell", "bell"),
        ("self.in_line = 1", "in_line", "line"),
        ("import a as office", "office", "office"),
        ("try: ...\nexcept E as deed: ...", "deed", "deed"),
        ("match 1:\n    case consent: ...", "consent", "consent"),
        ("match 1:\n    case [*letters]: ...", "letters", "letters"),
        ("SQLDoor = 1", "SQLDoor", "door"),
        ("why = 1", "why", "why"),
        ("_held = 1", "_held", "held"),
    ],
)
def test_a_word_in_a_name_is_found(source: str, name: str, word: str) -> None:
    assert found(source) == [f"name {name!r} contains {word!r}"]


def test_a_word_in_the_name_of_a_file_is_found() -> None:
    assert found("", "src/holdfast/postman.py") == ["name 'postman' contains 'postman'"]


@pytest.mark.parametrize(
    "source",
    [
        '"""Nobody reads it."""',
        'x = "nobody reads it"',
        'x = f"{y} nobody {z}"',
        'x = b"nobody"',
        'x = "queue_of_nobody"',
        "x = 1  # nobody reads it",
        "#: Nobody reads it.\nx = 1",
        'call({"nobody": 1})',
    ],
)
def test_a_word_in_prose_is_found(source: str) -> None:
    assert [text.lower() for text in found(source)] == ["prose contains 'nobody'"]


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("the job waits in line", "in line"),
        ("messages in hand", "in hand"),
        ("the job goes on", "goes on"),
        ("it was given up", "given up"),
        ("the row is handed over", "handed over"),
        ("--delay is no duration", "is no duration"),
        ("leases are none", "are none"),
        ("above so many bytes", "so many"),
        ("units such as seconds", "such as"),
        ("as many jobs run as may be", "as many jobs run as may be"),
        ("in a thread of its own.", "of its own"),
        ("a lane of its own that stays", "of its own"),
        ("read it once more", "once more"),
        ("the broker is well again", "is well again"),
        ("the worker takes leave", "takes leave"),
        ("the engine lost its memory", "lost its memory"),
        ("what became of the job", "what became of"),
    ],
)
def test_a_phrase_is_found(text: str, phrase: str) -> None:
    assert found(f'x = "{text}"') == [f"prose contains {phrase!r}"]
    assert found(text, "docs/page.md") == [f"prose contains {phrase!r}"]


def test_a_phrase_may_continue_on_the_next_line() -> None:
    expected = ["prose contains 'in line'"]
    assert found("# It waits in\n# line for ever.\nx = 1") == expected
    assert found('x = "it waits in "\\\n    "line"') == expected
    assert found('x = (\n    f"{y} waits in "\n    f"line {z}"\n)') == expected
    assert found('"""It waits in\n    line."""') == expected
    assert found("-- It waits in\n-- line.\nlocal x = 1", "a.lua") == expected
    assert found("It waits in\nline.", "README.md") == expected


def test_a_finding_says_where_and_what_to_write() -> None:
    (finding,) = Checker().check_file(FILE, '"""Fine.\n\n    A nudge.\n"""')
    assert str(finding) == f"{FILE}:3: prose contains 'nudge'; write wake"
    (finding,) = Checker().check_file("a.lua", "local a = 1\n-- Fine.\n-- A nudge.")
    assert (finding.path, finding.line) == ("a.lua", 3)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("a.lua", "local seats = {}", "name 'seats' contains 'seats'"),
        ("a.lua", "-- told: nothing", "prose contains 'told'"),
        ("a.lua", "return 'told'", "prose contains 'told'"),
        ("a.lua", 'return "told"', "prose contains 'told'"),
        ("a.sql", "SELECT 1 AS wish", "name 'wish' contains 'wish'"),
        ("a.sql", "-- nobody reads it", "prose contains 'nobody'"),
        ("a.sql", "SELECT 'nobody'", "prose contains 'nobody'"),
        ("CHANGELOG.md", "- nobody reads it", "prose contains 'nobody'"),
        ("ops/rules.yml", "summary: nobody reads it", "prose contains 'nobody'"),
        ("tools/run.sh", "# nobody reads it", "prose contains 'nobody'"),
    ],
)
def test_other_files_are_checked(path: str, source: str, expected: str) -> None:
    assert found(source, path) == [expected]


@pytest.mark.parametrize(
    "source",
    [
        "class DeadLetter: ...\ndead_letters = 1",
        '"""Dead letters, a dead-letter queue, a dead\n    letter."""',
        "# It takes a turn; look at the line in place, and leave room.",
        "replace = placeholder = outline = online = 1",
        "last_seen = took_ms = held_set = 1",
        "# There is no limit; it is no longer open; there are none.",
        'x = "x is None"',
        "# A view of its own job.",
        "import bell\nbell.ring(person=1)\nbell.tide()",
        "from bell import wish",
    ],
)
def test_ordinary_words_are_accepted(source: str) -> None:
    assert found(source) == []


def test_an_exception_is_only_for_its_files_and_its_text() -> None:
    checker = Checker([Allowed("told", "a/*.py", "told_at", "a column"), Allowed("hurry", "*", "hurry", "unused")])
    assert not checker.check_file("a/b.py", 'x = "told_at"')
    assert checker.check_file("b/b.py", 'x = "told_at"')
    assert checker.check_file("a/b.py", 'x = "told_at, told"')
    assert [entry.banned for entry in checker.unused()] == ["hurry"]


def test_an_exception_for_a_phrase() -> None:
    assert found('x = "a hand-over of the master"') == []
    assert found('x = "a hand over of the master"') == ["prose contains 'hand over'"]


def test_each_form_is_listed_once_with_a_replacement() -> None:
    forms = [form for word in WORDS for form in word.forms.split()]
    assert len(forms) == len(set(forms))
    assert all(word.use for word in WORDS)
    assert {word.checked for word in WORDS} == set(Checked)


def test_each_exception_has_a_reason_and_a_banned_word() -> None:
    banned = {form for word in WORDS for form in word.forms.split()} | {
        phrase.pattern for phrase in check_words.PHRASES
    }
    for entry in ALLOWED:
        assert entry.reason
        assert entry.banned in banned or set(entry.banned.split()) <= banned, entry


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small repository, as the command sees it."""
    for folder in ("src", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "src" / "clean.py").write_text("x = 1\n", encoding="utf-8")
    (tmp_path / "tests" / "test_a.py").write_text("def test_nobody(): ...\n", encoding="utf-8")
    monkeypatch.setattr(check_words, "SCOPE", ("src",))
    monkeypatch.setattr(check_words, "ALLOWED", ())
    monkeypatch.setattr(check_words, "Checker", lambda: Checker(check_words.ALLOWED))
    return tmp_path


def test_the_command_fails_with_the_findings(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tree)]) == 0
    (tree / "src" / "bad.py").write_text("desk = 1\n", encoding="utf-8")
    assert main(["--root", str(tree)]) == 1
    assert capsys.readouterr().out.startswith("src/bad.py:1: name 'desk' contains 'desk'; write ")


def test_the_names_of_tests_are_sentences(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tree), "tests"]) == 1
    assert "prose contains 'nobody'" in capsys.readouterr().out
    # Other names of tests may have words whose meaning depends on the test.
    (tree / "tests" / "test_a.py").write_text("def test_a_held_job_takes_no_line(): ...\nheld = 1\n", encoding="utf-8")
    assert main(["--root", str(tree), "tests"]) == 0
    (tree / "tests" / "test_a.py").write_text("desk = 1\n", encoding="utf-8")
    assert main(["--root", str(tree), "tests"]) == 1


def test_an_exception_that_is_not_used_fails(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_words, "ALLOWED", (Allowed("desk", "*", "desk", "no reason"),))
    assert main(["--root", str(tree)]) == 1
    assert "exception for 'desk' in * is not used" in capsys.readouterr().out


def test_a_path_that_does_not_exist_is_an_error(tree: Path) -> None:
    with pytest.raises(FileNotFoundError, match="correct the scope"):
        main(["--root", str(tree), "sources"])
