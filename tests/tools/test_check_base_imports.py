"""The check of imports of the base install: each of its failures."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from holdfast.extras import EXTRAS
from tools.check_base_imports import BASE, OWNERS, ROOT, problems, read_graph

SQLITE = "def build():\n    from kit.postgres import Store\n"
POSTGRES = "import asyncpg\n"


def write_tree(root: Path, **files: str) -> Path:
    (root / "kit").mkdir()
    for name, text in {"__init__": "", "sqlite": SQLITE, "postgres": POSTGRES, **files}.items():
        (root / "kit" / f"{name}.py").write_text(text)
    return root


def find_problems(root: Path, **files: str) -> list[str]:
    return problems(read_graph(write_tree(root, **files)), {"kit.postgres": ("postgres",)})


def test_an_import_inside_a_function_or_for_types_is_not_loaded(tmp_path: Path) -> None:
    assert (
        find_problems(tmp_path, types="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncpg\n") == []
    )


@pytest.mark.parametrize(
    "text",
    [
        "import asyncpg",
        "from asyncpg import Pool",
        "import asyncpg.pool",
        "try:\n    import asyncpg\nexcept ImportError:\n    asyncpg = None",
        "class Store:\n    import asyncpg",
        "import sys\nif sys.platform == 'linux':\n    import asyncpg",
        "match 1:\n    case 1:\n        import asyncpg",
        "import kit.postgres",
        "from kit import postgres",
        "from kit.postgres import Store",
    ],
)
def test_a_base_module_that_loads_an_optional_package_is_reported(tmp_path: Path, text: str) -> None:
    (problem,) = find_problems(tmp_path, worker=text + "\n")
    assert problem.startswith("kit.worker belongs to the base and must not load asyncpg: kit.worker → ")
    assert problem.endswith("asyncpg")


def test_an_import_reached_by_several_modules_is_reported_once(tmp_path: Path) -> None:
    assert find_problems(
        tmp_path, cli="import kit.worker\n", worker="import kit.deep\n", deep="import kit.postgres\n"
    ) == ["kit.deep belongs to the base and must not load asyncpg: kit.deep → kit.postgres → asyncpg"]


@pytest.mark.parametrize(("module", "package"), [("postgres", "hiredis"), ("worker", "numpy"), ("worker", "pytest")])
def test_a_package_of_another_extra_or_of_no_extra_is_a_problem(tmp_path: Path, module: str, package: str) -> None:
    (problem,) = find_problems(tmp_path, **{module: f"import {package}\n"})
    assert problem.endswith(f" and must not load {package}: kit.{module} → {package}")


def test_an_owner_that_does_not_exist_is_a_problem(tmp_path: Path) -> None:
    assert problems(read_graph(write_tree(tmp_path)), {"kit.postgres": ("postgres",), "kit.redis": ("redis",)}) == [
        "kit.redis: no such module; remove it from OWNERS"
    ]


def test_the_source_tree_passes() -> None:
    assert problems(read_graph(ROOT), OWNERS) == []


def test_the_tables_match_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras.keys() - {"all", "dev", "test"} == EXTRAS.keys()
    assert extras["all"] == [f"holdfast[{','.join(sorted(EXTRAS))}]"]
    assert [re.split(r"[\[>]", requirement)[0] for requirement in project["dependencies"]] == list(BASE)
