"""From `module:function` or `file.py:function` in a trigger's file to the function."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.errors import InvalidOption, MissingExtra


def load_callable(reference: str) -> Callable[..., Any]:
    """The function that a reference names; modules are looked for in the working directory first.

    Raises `InvalidOption` that says what was tried.
    """
    source, _, name = reference.rpartition(":")
    by_file = source.endswith(".py") or os.sep in source
    module = _import(reference, *(_of_file(reference, Path(source)) if by_file else (source, Path.cwd())))
    found = getattr(module, name, None)
    if not callable(found):
        what = f"has no {name!r}" if found is None else f"has a {name!r} that cannot be called"
        raise _cannot(reference, f"module {module.__name__!r} {what}")
    return found  # type: ignore[no-any-return]


def _of_file(reference: str, path: Path) -> tuple[str, Path]:
    """A file's name as a module, and where that is imported from."""
    if not path.is_file():
        raise _cannot(reference, f"there is no file {path} in {Path.cwd()}")
    path = path.resolve()
    root, name = path.parent, path.stem
    # A file inside a package is imported as the package's module, so that its relative imports work.
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    return name, root


def _import(reference: str, name: str, root: Path) -> ModuleType:
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except MissingExtra:
        raise
    except ModuleNotFoundError as exc:
        raise _cannot(reference, f"there is no module {exc.name!r}") from exc
    except Exception as exc:
        raise _cannot(reference, f"importing {name!r} raised {type(exc).__name__}: {exc}") from exc


def _cannot(reference: str, why: str) -> InvalidOption:
    return InvalidOption(f"cannot load {reference!r}: {why}")
