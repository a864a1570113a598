"""moto's server, as `moto_server` starts it, with calls to queues serialized by a lock.

moto handles every request in a separate thread and reads queues without a lock. Two concurrent receive calls can both
return messages of one group, and a deletion can restore a message that another call has just deleted. SQS guarantees
that neither happens. While a receive call waits, moto notices new messages, but not that a group or a message has
become available again; SQS notices both.
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

_POLL_S: Final = 0.02
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


def _serialize(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def locked(*args: Any, **options: Any) -> Any:
        with _lock:
            return method(*args, **options)

    return locked


def _receive_with_lock(
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
        sleep(_POLL_S)


if __name__ == "__main__":
    for name in _CHANGES:
        setattr(SQSBackend, name, _serialize(getattr(SQSBackend, name)))
    SQSBackend.receive_message = _receive_with_lock  # type: ignore[method-assign]
    # moto's check of the retention period scans the whole queue for each received message.
    SQSBackend.is_message_valid_based_on_retention_period = lambda *_: True  # type: ignore[method-assign]
    # Keep connections alive, as SQS does.
    WSGIRequestHandler.protocol_version = "HTTP/1.1"
    main()
