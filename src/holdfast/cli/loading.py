"""From `module:app` or `file.py:app` on the command line to the Holdfast it names.

Also without `:app` when the module holds exactly one. What cannot be loaded is a `UsageError` that says
what was tried.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from holdfast.app import Holdfast
from holdfast.errors import MissingExtra, UsageError


def load_app(reference: str) -> Holdfast:
    """The app that a reference names. Imports the user's module, from the working directory or its file."""
    source, _, attribute = reference.partition(":")
    if not source:
        raise _cannot(reference, "an app is module:app or file.py:app")
    by_file = source.endswith(".py") or os.sep in source
    module = _import_file(reference, Path(source)) if by_file else _import_module(reference, source)
    return _pick(reference, module, attribute) if attribute else _only_one(reference, module)


def _import_file(reference: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise _cannot(reference, f"there is no file {path} in {Path.cwd()}")
    path = path.resolve()
    root, name = path.parent, path.stem
    # A file inside a package is imported as the package's module, so that its relative imports work.
    while (root / "__init__.py").is_file():
        root, name = root.parent, f"{root.name}.{name}"
    module = _import(reference, name, root)
    if Path(module.__file__ or "").resolve() != path:
        raise _cannot(reference, f"the name {name!r} is taken by {module.__file__ or 'a built-in'}; rename the file")
    return module


def _import_module(reference: str, name: str) -> ModuleType:
    return _import(reference, name, Path.cwd())


def _import(reference: str, name: str, root: Path) -> ModuleType:
    # By its real name and from its real place, so that child processes can import it again.
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except MissingExtra:
        # Says already what to install.
        raise
    except ModuleNotFoundError as exc:
        if exc.name is not None and (name == exc.name or name.startswith(exc.name + ".")):
            raise _cannot(reference, f"there is no module {exc.name!r} in {root} or on the Python path") from exc
        raise _cannot(reference, f"module {name!r} imports {exc.name!r}, which is not installed") from exc
    except Exception as exc:
        raise _cannot(
            reference, f"importing {name!r} raised {type(exc).__name__}: {exc} (--debug shows where)"
        ) from exc


def _pick(reference: str, module: ModuleType, attribute: str) -> Holdfast:
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Holdfast):
        return found
    what = f"no {attribute!r}" if found is None else f"{attribute!r} is a {type(found).__name__}, not a Holdfast"
    raise _cannot(reference, f"module {module.__name__!r} from {module.__file__}: {what}; {_offer(module)}")


def _only_one(reference: str, module: ModuleType) -> Holdfast:
    apps = {id(value): value for value in vars(module).values() if isinstance(value, Holdfast)}
    if len(apps) != 1:
        raise _cannot(reference, f"module {module.__name__!r} from {module.__file__}: {_offer(module)}")
    return next(iter(apps.values()))


def _offer(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Holdfast)]
    if not names:
        return "there is no Holdfast in it"
    return "it has " + ", ".join(f"{module.__name__}:{name}" for name in names)


def _cannot(reference: str, why: str) -> UsageError:
    return UsageError(f"cannot load app {reference!r}: {why}")
