"""The map of the source tree names every package, only files that exist, and the imports of the code."""

from __future__ import annotations

import re

import pytest

from tools import import_graph
from tools.walks import PACKAGE, PAGE

_PATH = re.compile(r"`([\w/]+(?:/|\.py|\.lua|\.sql))`")


def test_every_path_on_the_page_exists() -> None:
    paths = _PATH.findall(PAGE.read_text(encoding="utf-8"))
    assert len(paths) > 100
    root = PACKAGE.parent.parent
    assert sorted({path for path in paths if not (PACKAGE / path).exists() and not (root / path).exists()}) == []


def test_every_root_module_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert sorted(name for name in modules if f"`holdfast.{name}`" not in page) == []


def test_the_layers_name_every_package() -> None:
    layers = {name for layer in import_graph.read_layers() for name in layer}
    assert layers == set(import_graph.package_imports(import_graph.build()))


@pytest.mark.parametrize(
    ("importer", "imported", "is_drawn"),
    [
        ("holdfast.guard.runner", "holdfast.observe.redact", True),
        # It follows from others: the ledger imports the schema.
        ("holdfast.http.service", "holdfast.schema.jobs", False),
    ],
)
def test_an_import_changes_the_generated_parts(importer: str, imported: str, is_drawn: bool) -> None:
    layers, graph = import_graph.read_layers(), import_graph.build()
    before = import_graph.package_imports(graph)
    graph.add_import(importer=importer, imported=imported)
    after = import_graph.package_imports(graph)
    assert import_graph.table(layers, after) != import_graph.table(layers, before)
    assert (import_graph.flowchart(layers, after) != import_graph.flowchart(layers, before)) is is_drawn


def test_arrows_that_follow_from_others_are_not_drawn() -> None:
    layers = [["app"], ["client"], ["core"], ["errors"]]
    imports = {"app": {"client", "core"}, "client": {"core"}, "core": {"errors"}, "errors": set[str]()}
    arrows = re.findall(r"p_(\w+) --> p_(\w+)", import_graph.flowchart(layers, imports))
    assert arrows == [("app", "client"), ("client", "core")]
    assert "| 1 | `app` | `client`, `core` |" in import_graph.table(layers, imports)
