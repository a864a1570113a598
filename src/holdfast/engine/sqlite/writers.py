"""The writers of this process, one for each file, shared by all engines on it."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Final

from holdfast.engine.sqlite.connection import translate
from holdfast.engine.sqlite.writer import Writer
from holdfast.errors import EngineUnavailable

_writers: Final[dict[Path, Writer]] = {}
_registry: threading.Lock = threading.Lock()


def acquire(path: Path, *, durable: bool = True) -> Writer:
    """This process's writer for the file, started if need be. Blocks."""
    with _registry:
        writer = _writers.get(path)
        if writer is None:
            try:
                writer = Writer(path, durable)
            except sqlite3.Error as exc:
                raise translate(exc, path) from exc
            except OSError as exc:
                raise EngineUnavailable(
                    f"the database {path} cannot be opened: {exc.strerror}; the directory must exist and be writable"
                ) from exc
            _writers[path] = writer
        writer.engines += 1
        return writer


def release(writer: Writer) -> None:
    """Give it back; the last one ends the thread. Blocks."""
    with _registry:
        if _writers.get(writer.path) is not writer:
            # Acquired before a fork: it is the parent's.
            return
        writer.engines -= 1
        if writer.engines == 0:
            del _writers[writer.path]
            writer.close()


def _forget_writers() -> None:
    """A forked child has none of the threads, and must not touch its parent's connections."""
    global _registry
    _registry = threading.Lock()
    _orphans.extend(_writers.values())
    for writer in _writers.values():
        writer.forget()
    _writers.clear()


#: Kept, so that no connection of the parent is ever closed here: that would cut its log.
_orphans: Final[list[Writer]] = []
os.register_at_fork(after_in_child=_forget_writers)
