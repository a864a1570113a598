"""`AnnouncedTask`: a task as a worker announces it, for submissions and operators that do not have the app."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final

import msgspec

from holdfast.core.codec import decode_json
from holdfast.core.job import InstantMs, PriorityLevel
from holdfast.core.json_schema import find_mismatch
from holdfast.errors import InvalidPayload

#: A longer schema is not announced: payloads of the task are then not checked.
SCHEMA_LIMIT: Final = 64 * 1024
#: How often a running worker repeats its announcements.
ANNOUNCE_INTERVAL_S: Final = 60.0
#: Schemas of a task that were announced in this time are current: several, during a deployment.
CURRENT_MS: Final = 10 * 60 * 1000
#: A schema that was not announced for this long is deleted when its task is announced with another one.
KEEP_MS: Final = 30 * 86_400_000

_Name = Annotated[str, msgspec.Meta(max_length=1_000)]


class AnnouncedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One schema of a task. During a deployment, a task may have several."""

    task: _Name
    queue: _Name
    fingerprint: Annotated[str, msgspec.Meta(max_length=64)]
    #: The JSON Schema of its arguments, as JSON; empty if it cannot be described or is too long.
    schema: Annotated[str, msgspec.Meta(max_length=SCHEMA_LIMIT)] = ""
    priority: PriorityLevel = 1
    #: When a worker announced it last, by the store's clock.
    seen_at_ms: InstantMs = 0

    @property
    def document(self) -> dict[str, Any] | None:
        """The decoded schema; None if there is none."""
        try:
            schema = msgspec.json.decode(self.schema) if self.schema else None
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            return None
        return schema if isinstance(schema, dict) else None


def newest_first(tasks: Iterable[AnnouncedTask]) -> list[AnnouncedTask]:
    """Announcements of each task, by name; the latest of a task is the first."""
    return sorted(tasks, key=lambda each: (each.task, -each.seen_at_ms, each.fingerprint))


def merge(*sources: Iterable[AnnouncedTask]) -> list[AnnouncedTask]:
    """Announcements of several stores, each schema once, as `newest_first`."""
    found: dict[tuple[str, str], AnnouncedTask] = {}
    for each in (task for source in sources for task in source):
        known = found.get((each.task, each.fingerprint))
        if known is None or known.seen_at_ms < each.seen_at_ms:
            found[each.task, each.fingerprint] = each
    return newest_first(found.values())


def choose(task: str, payload: bytes, announced: Sequence[AnnouncedTask]) -> AnnouncedTask:
    """The announcement that a payload fits. Raises `InvalidPayload`.

    `announced` are those of the task, the latest first, at least one. Workers may have several schemas during a
    deployment: the payload must fit the latest, or another one that is current.
    """
    value = decode_json(payload, f"the payload of task {task!r}")
    first: str | None = None
    for each in announced:
        if each.seen_at_ms < announced[0].seen_at_ms - CURRENT_MS:
            break
        mismatch = _mismatch(each, value)
        if mismatch is None:
            return each
        first = first or mismatch
    raise InvalidPayload(f"the payload does not fit task {task!r} as workers announced it: {first}")


def _mismatch(announced: AnnouncedTask, value: Any) -> str | None:
    schema = announced.document
    if schema is None:
        return None
    if isinstance(value, list):
        names = list(schema.get("properties") or {})
        if len(value) > len(names):
            return f"{len(value)} positional arguments for {len(names)} parameters"
        value = dict(zip(names, value, strict=False))
    if not isinstance(value, dict):
        return "it is neither an object of keyword arguments nor an array of positional ones"
    return find_mismatch(value, schema)
