"""What counts as an app on the command line, and the errors for one that cannot be loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.cli.session import load_app
from holdfast.errors import UsageError

ONE = "from holdfast import Holdfast\napp = Holdfast('sqlite:///one.db')\nalias = app\n"
TWO = "from holdfast import Holdfast\nfirst = Holdfast()\nsecond = Holdfast()\nnumber = 7\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules that a test imports are removed after it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize(
    "reference", ["shop_one.py:app", "shop_one:app", "shop_one.py", "shop_one", "./shop_one.py:alias"]
)
def test_an_app_is_loaded_by_module_or_file_with_or_without_its_name(folder: Path, reference: str) -> None:
    (folder / "shop_one.py").write_text(ONE)
    app = load_app(reference)
    assert isinstance(app, Holdfast)
    assert app.settings.url == "sqlite:///one.db"


def test_an_app_is_loaded_from_another_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (folder / "shop_far.py").write_text("import shop_far_helper\n" + ONE)
    (folder / "shop_far_helper.py").write_text("")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert isinstance(load_app(f"{folder}/shop_far.py:app"), Holdfast)


def test_a_file_in_a_package_keeps_its_relative_imports(folder: Path) -> None:
    package = folder / "shop_package" / "inner"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "apps.py").write_text(
        "from holdfast import Holdfast\nfrom . import helper\nclass Box:\n    app = Holdfast()\n"
    )
    (package / "helper.py").write_text("")
    assert isinstance(load_app("shop_package/inner/apps.py:Box.app"), Holdfast)
    assert load_app("shop_package.inner.apps:Box.app") is load_app("shop_package/inner/apps.py:Box.app")


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (":app", "an app is module:app or file.py:app"),
        ("missing.py:app", "file missing.py not found in"),
        ("missing_module:app", "module 'missing_module' not found in"),
        ("shop_two.missing:app", "module 'shop_two.missing' not found in"),
        ("shop_two", "it has shop_two:first, shop_two:second"),
        ("shop_two:third", "no 'third'; it has shop_two:first, shop_two:second"),
        ("shop_two:number", "'number' is a int, not a Holdfast"),
        ("shop_none.py", "it has no Holdfast object"),
        ("shop_broken.py:app", "importing 'shop_broken' raised ZeroDivisionError"),
        ("shop_syntax.py:app", "importing 'shop_syntax' raised SyntaxError"),
        ("shop_import.py:app", "imports 'not_installed_anywhere', which is not installed"),
        ("json.py:app", "the name 'json' is taken by"),
    ],
)
def test_the_error_for_an_app_that_cannot_be_loaded_names_the_cause(folder: Path, reference: str, message: str) -> None:
    (folder / "shop_two.py").write_text(TWO)
    (folder / "shop_none.py").write_text("")
    (folder / "shop_broken.py").write_text("1 / 0")
    (folder / "shop_syntax.py").write_text("def")
    (folder / "shop_import.py").write_text("import not_installed_anywhere")
    (folder / "json.py").write_text(ONE)
    with pytest.raises(UsageError) as caught:
        load_app(reference)
    assert f"cannot load app {reference!r}" in str(caught.value)
    assert message in str(caught.value)
