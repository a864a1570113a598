"""Names of keys in Redis. Pure.

Namespace and queue can be read from every key, so that two deployments never share one:

    {namespace:queue}:NAME   with a hash tag; every queue on Cluster, and every queue but the default one
    {queue}:NAME             without a namespace; `{:queue}:NAME` if the queue's name has a colon
    namespace:NAME, NAME     the default queue on one server, so that any Redis client finds its streams

A namespace has no colon, and neither part has braces, so a tag is read up to its first colon. A plain name is read up
to its first colon as well: it belongs to that namespace if one of `_WORDS` follows, otherwise to the deployment
without a namespace. A configured name that would be read wrongly has a hash tag on one server, too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from holdfast.core.job import DEFAULT_QUEUE
from holdfast.errors import InvalidOption

#: The first words of all keys in a namespace. Configured names may begin with the first two.
_WORDS: Final = ("stream", "queue", "job", "idempotency", "announced", "queues")
_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]*")
#: Without a namespace, any text follows this word: a record's job id.
_RECORDS: Final = "job"
_FIXED: Final = frozenset(
    {
        *(f"stream:{name}" for name in ("feed", "wake", "notices")),
        *(f"queue:{name}" for name in ("delayed", "waiting", "held", "dead", "control", "lanes", "workers", "waiters")),
        *("queue:ids", "queue:replaced"),
        *("queues", "announced:tasks", "owners"),
    }
)
#: What follows the name of the task stream.
_LANES: Final = re.compile(r":(?:high|low|direct|lane:.*)", re.DOTALL)


def queue_prefix(namespace: str, queue: str, *, tagged: bool = False) -> str:
    """The prefix of a queue's keys: plain for the default queue; otherwise, or if `tagged`, a hash tag.

    Raises `InvalidOption` for a queue's name with braces, which could contain another queue's keys.
    """
    if "{" in queue or "}" in queue:
        raise InvalidOption(f"queue {queue!r} must not contain braces")
    if tagged or queue != DEFAULT_QUEUE:
        return f"{{{namespace}:{queue}}}:" if namespace or ":" in queue else f"{{{queue}}}:"
    return f"{namespace}:" if namespace else ""


def configured_key(namespace: str, queue: str, name: str, *, tagged: bool = False) -> str:
    """The key of a queue with a configured name; with a hash tag if another namespace could have the plain one."""
    return queue_prefix(namespace, queue, tagged=tagged or _is_ambiguous(namespace, name)) + name


def _is_ambiguous(namespace: str, name: str) -> bool:
    first, second = (*name.split(":", 2), "")[:2]
    if namespace:
        return first not in _WORDS[:2]
    return name.startswith("{") or (second in _WORDS and _NAMESPACE.fullmatch(first) is not None)


def queues_key(namespace: str) -> str:
    """The set of all queues of a namespace."""
    return f"{namespace}:queues" if namespace else "queues"


def former_key(namespace: str, queue: str, name: str, *, tagged: bool = False) -> str:
    """The key as earlier versions wrote it. It may be a key of another namespace: `owner_of` names that one."""
    if tagged or queue != DEFAULT_QUEUE:
        return f"{{{namespace}:{queue}}}:{name}" if namespace else f"{{{queue}}}:{name}"
    return f"{namespace}:{name}" if namespace else name


def owner_of(key: str) -> tuple[str, str]:
    """Namespace and queue of a key."""
    if key.startswith("{"):
        tag = key[1:].partition("}")[0]
        namespace, colon, queue = tag.partition(":")
        return (namespace, queue) if colon else ("", tag)
    first, second = (*key.split(":", 2), "")[:2]
    in_namespace = second in _WORDS and _NAMESPACE.fullmatch(first) is not None and first != _RECORDS
    return (first if in_namespace else ""), DEFAULT_QUEUE


def check_key_names(namespace: str, names: Mapping[str, str], *, tagged: bool) -> None:
    """Check a namespace and configured names, by setting. Raises `InvalidOption` for keys with two meanings."""
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidOption(f"namespace (HOLDFAST_NAMESPACE) {namespace!r} may contain only A-Z, a-z, 0-9, _ . -")
    if namespace == _RECORDS and not tagged:
        raise InvalidOption(
            f"namespace (HOLDFAST_NAMESPACE) {namespace!r} cannot be used on one Redis server, where keys that begin "
            f"with '{_RECORDS}:' are records of jobs without a namespace; choose another one"
        )
    task = names["stream_task"]
    known = set(_FIXED)
    for setting, name in names.items():
        lane = name.startswith(task) and _LANES.fullmatch(name, len(task)) is not None
        if lane or name in known or name.partition(":")[0] in ("job", "idempotency"):
            raise InvalidOption(
                f"{setting} (HOLDFAST_{setting.upper()}) {name!r} is the name of another key of holdfast; "
                "choose another one"
            )
        known.add(name)
