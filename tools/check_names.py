"""Check that each class name is defined only once in the source tree. Part of `make check`."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent / "src"


def find_repeated_classes(root: Path) -> list[str]:
    """One line for each class name that is defined more than once at the top level of a module."""
    locations: dict[str, list[str]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                locations[node.name].append(f"{path.relative_to(root)}:{node.lineno}")
    return [f"class {name} is defined in {', '.join(found)}" for name, found in locations.items() if len(found) > 1]


def main() -> int:
    found = find_repeated_classes(ROOT)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
