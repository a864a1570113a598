"""moto's server, as `moto_server` starts it, with queues that do one thing at a time.

moto answers every request in a thread of its own and looks at a queue without a lock: two that receive at the same time
can both be given messages of one group, and a deletion can bring back what another one has just removed. SQS promises
that neither happens. While it waits for messages, moto notices new ones, but not that a group or a message has become
free again: SQS does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from time import monotonic, sleep
from typing import Any, Final

from moto.server import main
from moto.sqs.models import Message, SQSBackend
from werkzeug.serving import WSGIRequestHandler

_LOOK_S: Final = 0.02
_CHANGES: Final = (
    "change_message_visibility",
    "change_message_visibility_batch",
    "delete_message",
    "delete_message_batch",
    "purge_queue",
    "send_message",
    "send_message_batch",
)

_lock: Final = threading.RLock()
_receive_message: Final = SQSBackend.receive_message


def _one_at_a_time(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def locked(*args: Any, **options: Any) -> Any:
        with _lock:
            return method(*args, **options)

    return locked


def _received(
    self: SQSBackend,
    queue_name: str,
    count: int,
    wait_seconds_timeout: int,
    visibility_timeout: int,
    message_attribute_names: list[str] | None = None,
) -> list[Message]:
    deadline = monotonic() + wait_seconds_timeout
    while True:
        with _lock:
            found = _receive_message(self, queue_name, count, 0, visibility_timeout, message_attribute_names)
        if found or monotonic() >= deadline:
            return found
        sleep(_LOOK_S)


if __name__ == "__main__":
    for name in _CHANGES:
        setattr(SQSBackend, name, _one_at_a_time(getattr(SQSBackend, name)))
    SQSBackend.receive_message = _received  # type: ignore[method-assign]
    # It counts the whole queue for each message that is received, to see whether it is days old.
    SQSBackend.is_message_valid_based_on_retention_period = lambda *_: True  # type: ignore[method-assign]
    # Connections are kept, as SQS keeps them.
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    main()
