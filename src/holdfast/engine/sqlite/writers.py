"""The writers of this process, one for each file, shared by all engines and ledgers on it."""

from __future__ import annotations

import os
import sqlite3
import threading
from pathlib import Path
from typing import Final

from holdfast.engine.sqlite.connection import Prepare, prepare_schema, translate
from holdfast.engine.sqlite.writer import Writer
from holdfast.errors import EngineUnavailable, InvalidOption, Unavailable

_writers: Final[dict[Path, Writer]] = {}
_registry: threading.Lock = threading.Lock()


def acquire(
    path: Path,
    *,
    durable: bool = True,
    prepare: Prepare = prepare_schema,
    unavailable: type[Unavailable] = EngineUnavailable,
) -> Writer:
    """This process's writer for the file (an absolute path), started if need be. Blocks.

    `prepare` is the same function for all who share a file: an engine's and a ledger's of its own are two files.
    """
    with _registry:
        writer = _writers.get(path)
        if writer is None:
            try:
                writer = Writer(path, durable, prepare)
            except sqlite3.Error as exc:
                raise translate(exc, path, unavailable) from exc
            except OSError as exc:
                raise unavailable(
                    f"the database {path} cannot be opened: {exc.strerror}; the directory must exist and be writable"
                ) from exc
            _writers[path] = writer
        elif writer.prepare is not prepare:
            raise InvalidOption(f"{path} is in use as another kind of store; give the ledger a file of its own")
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
