"""Regenerate the generated parts of `docs/`, or with `--check` only report whether they are current.

A generated part is between `<!-- generated: NAME -->` and `<!-- end -->`; the rest of a page is written by hand and not
changed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from holdfast.core.states import FINAL, MOVES, State, event_for, mermaid_diagram
from tools import cli_reference, import_graph

ROOT: Final = Path(__file__).resolve().parent.parent
PAGES: Final = tuple(
    ROOT / "docs" / page for page in ("reference/states.md", "reference/cli.md", "explanation/architecture.md")
)

_PART: Final = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def diagram() -> str:
    """The state diagram."""
    return f"```mermaid\n{mermaid_diagram()}\n```\n"


def moves() -> str:
    """Every state with its legal target states."""
    lines = ["| from | to |", "|---|---|"]
    for state, targets in MOVES.items():
        names = ", ".join(f"`{target}`" for target in State if target in targets)
        lines.append(f"| {_name(state)} | {names or '– (final)'} |")
    return "\n".join(lines) + "\n"


def events() -> str:
    """The event of each move."""
    lines = ["| move | event |", "|---|---|"]
    for state, targets in MOVES.items():
        lines += [f"| {_name(state)} → `{to}` | `{event_for(state, to)}` |" for to in State if to in targets]
    reclaimed = event_for(State.RUNNING, State.RUNNING)
    lines.append(f"| `running` → `running`, by another worker (a reclaim, not a change of state) | `{reclaimed}` |")
    return "\n".join(lines) + "\n"


def finals() -> str:
    """The final states."""
    return ", ".join(f"`{state}`" for state in State if state in FINAL) + ".\n"


@cache
def _imports() -> Mapping[str, set[str]]:
    return import_graph.package_imports(import_graph.build())


def layers() -> str:
    """The packages in their layers, with arrows for the imports that do not follow from others."""
    return import_graph.flowchart(import_graph.read_layers(), _imports())


def imports() -> str:
    """Every import between packages."""
    return import_graph.table(import_graph.read_layers(), _imports())


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "diagram": diagram,
    "moves": moves,
    "events": events,
    "finals": finals,
    "exit_codes": cli_reference.exit_codes,
    "commands": cli_reference.commands,
    "layers": layers,
    "imports": imports,
}


def render(page: str) -> str:
    """The page with its generated parts replaced by current ones."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}{part[4]}", page)


def _name(state: State | None) -> str:
    return f"`{state}`" if state else "(new)"


def main(arguments: list[str]) -> int:
    stale = []
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        fresh = render(page)
        if fresh == page:
            continue
        stale.append(path.relative_to(ROOT))
        if "--check" not in arguments:
            path.write_text(fresh, encoding="utf-8")
    for page_path in stale:
        print(f"{'stale' if '--check' in arguments else 'written'}: {page_path}")
    if stale and "--check" in arguments:
        print("run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
