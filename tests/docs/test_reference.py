"""The reference pages are complete and current."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast import errors
from holdfast.core import verdict
from holdfast.errors import HoldfastError
from holdfast.settings import Settings
from tools.gen_docs import PAGES, PARTS, render

DOCS = Path(__file__).resolve().parents[2] / "docs"

ERROR_CODES = {
    kind.code: name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, HoldfastError) and kind.__module__ == errors.__name__
}
FAILURE_CODES = {
    value for name, value in vars(verdict).items() if name.isupper() and isinstance(value, str) and name == value
}


def first_cells(page: str) -> list[list[str]]:
    lines = (DOCS / "reference" / page).read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]


def test_every_error_code_is_documented_with_its_class() -> None:
    documented = {row[0].strip("`"): row[1].strip("`") for row in first_cells("failure-codes.md") if len(row) == 4}
    assert documented == ERROR_CODES


def test_exactly_the_failure_codes_are_documented() -> None:
    assert len(FAILURE_CODES) >= 8
    documented = {row[0].strip("`") for row in first_cells("failure-codes.md") if len(row) == 3}
    assert documented - set(ERROR_CODES) == FAILURE_CODES - set(ERROR_CODES)


def test_every_setting_is_documented_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in first_cells("settings.md") if len(row) == 3}
    defaults = {
        name: field.get_default(call_default_factory=True, validated_data={})
        for name, field in Settings.model_fields.items()
    }
    assert rows == {name: repr(value).replace("'", '"') for name, value in defaults.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert render(text) == text


def test_every_generated_part_is_on_one_page() -> None:
    named = [
        name for page in PAGES for name in re.findall(r"<!-- generated: (\w+) -->", page.read_text(encoding="utf-8"))
    ]
    assert sorted(named) == sorted(PARTS)


def test_links_between_pages_are_valid() -> None:
    root = DOCS.parent
    pages = [*root.glob("*.md"), *DOCS.rglob("*.md")]
    broken = [
        f"{page.relative_to(root)} → {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []
