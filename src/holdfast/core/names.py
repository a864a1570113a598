"""How the names of a queue begin in a store that many programs share."""

from __future__ import annotations

from holdfast.core.job import DEFAULT_QUEUE


def queue_prefix(namespace: str, queue: str, *, tagged: bool = False) -> str:
    """What goes before each of a queue's names: plain for the default queue, else (or if `tagged`) a hash tag."""
    if tagged or queue != DEFAULT_QUEUE:
        return f"{{{namespace}:{queue}}}:" if namespace else f"{{{queue}}}:"
    return f"{namespace}:" if namespace else ""
