"""Where the servers of a deployment are found, and what to do if they are not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from holdfast.errors import UsageError

#: Looked at after PATH. `*` is a release's number: the newest one first.
_FOLDERS: Final = ("/usr/bin", "/usr/local/bin", "/opt/redis/bin", "/usr/lib/postgresql/*/bin", "/opt/homebrew/bin")


def find_redis(given: Path | None = None) -> Path:
    """`redis-server`: the one that was named, else the first on PATH and in the usual folders. Raises `UsageError`."""
    if given is not None:
        if not given.is_file():
            raise UsageError(f"there is no redis-server at {given}; name another with --redis-server")
        return given
    found = _find("redis-server")
    if found is None:
        raise UsageError("no redis-server here: `apt-get install redis-server`, or name one with --redis-server PATH")
    return found


def find_postgres() -> Path:
    """`postgres`, with `initdb` beside it. Raises `UsageError`."""
    # Debian's `postgres` is not on PATH; some put a link there without `initdb` beside it.
    found = next((each for each in _places("postgres") if each.with_name("initdb").exists()), None)
    if found is None:
        raise UsageError("no postgres with initdb beside it here: `apt-get install postgresql`")
    return found


def _find(name: str) -> Path | None:
    return next(_places(name), None)


def _places(name: str) -> Iterator[Path]:
    on_path = shutil.which(name)
    if on_path is not None:
        yield Path(on_path).resolve() if name == "postgres" else Path(on_path)
    for folder in _FOLDERS:
        base, star, rest = folder.partition("*")
        matches = Path(base).glob("*" + rest) if star else [Path(folder)]
        for match in sorted(matches, key=_release, reverse=True):
            if (match / name).is_file():
                yield match / name


def _release(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(folder))]
