"""Layers and imports of the packages in `src/holdfast`, for `docs/explanation/architecture.md`.

The layers are those of import-linter's contract in `pyproject.toml`; the imports are read from the code. As in the
contract, imports inside functions count and those under `TYPE_CHECKING` do not.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Final

import grimp

ROOT: Final = Path(__file__).resolve().parent.parent
_PACKAGE: Final = "holdfast"

#: Package or root module → those that it imports.
Imports = Mapping[str, Set[str]]


def read_layers() -> list[list[str]]:
    """Packages and root modules by layer, the highest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    contract = next(contract for contract in settings["contracts"] if contract["id"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def build() -> grimp.ImportGraph:
    """The graph of all modules."""
    return grimp.build_graph(_PACKAGE, exclude_type_checking_imports=True, cache_dir=None)


def package_imports(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """Imports between packages. The root package itself only re-exports, and is left out."""
    imports: dict[str, set[str]] = {}
    for module in graph.modules:
        if (importer := _package_of(module)) is not None:
            targets = {_package_of(imported) for imported in graph.find_modules_directly_imported_by(module)}
            imports.setdefault(importer, set()).update(target for target in targets if target not in (None, importer))
    return imports


def flowchart(layers: Sequence[Sequence[str]], imports: Imports) -> str:
    """A Mermaid flowchart. An import that also follows from others is not drawn, nor are the layers below `core`."""
    drawn = [*itertools.takewhile(lambda layer: layer != ["core"], layers), ["core"]]
    shown = {name for layer in drawn for name in layer}
    reduced = _reduce({name: imports.get(name, set()) & shown for name in shown})
    lines = ["```mermaid", "flowchart TD"]
    for number, layer in enumerate(drawn, 1):
        nodes = [f"{_node(name)}[{name}]" for name in layer]
        lines += [f'    subgraph L{number}[" "]', *(f"        {node}" for node in nodes), "    end"]
    for name in (name for layer in drawn for name in layer):
        lines += [f"    {_node(name)} --> {_node(target)}" for target in sorted(reduced[name])]
    return "\n".join([*lines, "```"]) + "\n"


def table(layers: Sequence[Sequence[str]], imports: Imports) -> str:
    """All imports, one row per package, in the order of the layers."""
    lines = ["| layer | package | imports |", "|---|---|---|"]
    for number, layer in enumerate(layers, 1):
        for name in layer:
            targets = ", ".join(f"`{target}`" for target in sorted(imports.get(name, ())))
            lines.append(f"| {number} | `{name}` | {targets or '–'} |")
    return "\n".join(lines) + "\n"


def _package_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def _reduce(imports: Imports) -> dict[str, set[str]]:
    """Drop every edge whose target is also reached by a longer path. The layers exclude cycles."""
    reached: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            direct = imports.get(name, set())
            reached[name] = set(direct).union(*map(reach, direct))
        return reached[name]

    return {
        name: {target for target in direct if not any(target in reach(other) for other in direct - {target})}
        for name, direct in imports.items()
    }


def _node(name: str) -> str:
    # `end` and names with underscores at their start are not safe as node ids.
    return f"p_{name.strip('_')}"
