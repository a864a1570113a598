"""The check of names passes on this tree and finds a class that is defined twice."""

from __future__ import annotations

from pathlib import Path

from tools.check_names import ROOT, find_repeated_classes


def test_the_source_tree_passes() -> None:
    assert find_repeated_classes(ROOT) == []


def test_a_class_that_is_defined_twice_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("class Store: ...\n")
    (tmp_path / "two.py").write_text("x = 1\n\nclass Store: ...\n\nclass Other: ...\n")
    assert find_repeated_classes(tmp_path) == ["class Store is defined in one.py:1, two.py:3"]
