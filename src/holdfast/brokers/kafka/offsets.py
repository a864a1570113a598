"""Partitions assigned to a Kafka consumer and the messages of each that are in flight.

Shared by the poller thread and the event loop; every method is atomic. A commit never passes a message in flight: it
ends at the lowest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from threading import Condition
from time import monotonic
from typing import Final

from holdfast.brokers.port import RawMessage

#: Number of acknowledged messages after which a commit is due immediately.
_COMMIT_AFTER: Final = 1_000
#: `wait_for_capacity` wakes when 1/N of the limit is free: waking for each message would cost a thread switch each.
_FREE_FRACTION: Final = 4
#: Assignment numbers, unique in the process, so that no consumer mistakes the message of another for its own.
_numbers: Final = count(1)


class _PartitionOffsets:
    """One assignment of one partition. A partition that is assigned again gets a new instance."""

    __slots__ = ("before", "committed", "in_flight", "leaving", "number", "position", "started")

    def __init__(self, number: int, before: int | None = None) -> None:
        self.number = number
        #: The client's position at assignment, left over from an earlier assignment.
        self.before = before
        #: Offset of the next message; None until the first one.
        self.position: int | None = None
        #: Offset → delivery count, ordered by offset.
        self.in_flight: dict[int, int] = {}
        #: Offsets whose ownership was confirmed: they are being handled.
        self.started: set[int] = set()
        self.leaving = False
        self.committed: int | None = None

    def safe(self) -> int | None:
        """The offset up to which a commit is safe: all messages below are done."""
        return next(iter(self.in_flight), self.position)


class InFlightOffsets:
    """Offsets of all assigned partitions. `limit` caps the messages in flight."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: `wait_for_capacity` wakes at this number of messages in flight.
        self._low_mark = limit - max(1, limit // _FREE_FRACTION)
        self._changed = Condition()
        self._assigned: dict[int, _PartitionOffsets] = {}
        self._in_flight = 0
        self._done_since_commit = 0

    # For the poller thread --------------------------------------------------------------------------

    def assign(self, partitions: Iterable[int], before: Mapping[int, int] | None = None) -> None:
        """Record an assignment. `before` has the client's positions, left over from earlier assignments."""
        with self._changed:
            for partition in partitions:
                self._drop(partition)
                self._assigned[partition] = _PartitionOffsets(next(_numbers), (before or {}).get(partition))

    def partitions(self) -> list[int]:
        """The assigned partitions."""
        with self._changed:
            return list(self._assigned)

    def reach(self, positions: Mapping[int, int]) -> None:
        """Advance to the client's positions.

        They are past transaction markers and aborted messages, which are not delivered.

        Every message before these positions must have gone through `add`.
        """
        with self._changed:
            for partition, position in positions.items():
                assigned = self._assigned.get(partition)
                if assigned is None:
                    continue
                # Until the first read of this assignment, the client reports the position of the previous one.
                is_current = position != assigned.before if assigned.position is None else position > assigned.position
                if is_current:
                    assigned.position = position

    def add(self, partition: int, offset: int) -> int | None:
        """Record a received message. Returns the assignment number to keep with it.

        None if its partition is not assigned here, or is being revoked.
        """
        with self._changed:
            assigned = self._assigned.get(partition)
            if assigned is None or assigned.leaving:
                return None
            if assigned.position is not None and offset < assigned.position:
                # The client restarted at a lower offset: messages from there are delivered again, under a new number.
                self._drop(partition)
                assigned = self._assigned[partition] = _PartitionOffsets(next(_numbers))
            assigned.position = offset + 1
            assigned.in_flight[offset] = 1
            self._in_flight += 1
            return assigned.number

    def free_slots(self) -> int:
        """How many more messages may be received."""
        with self._changed:
            return max(0, self._limit - self._in_flight)

    def wait_for_capacity(self, seconds: float) -> bool:
        """Wait up to `seconds` until a good part of the limit is free. Returns whether any of it is free."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight <= self._low_mark, seconds)
            return self._in_flight < self._limit

    def wake(self) -> None:
        """End every `wait_for_capacity` early."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_handovers(self, partitions: Iterable[int], seconds: float) -> int:
        """Make `holds` False for these partitions and wait up to `seconds` for messages being handled.

        Returns how many are still being handled.
        """
        with self._changed:
            leaving = [self._assigned[partition] for partition in partitions if partition in self._assigned]
            for assigned in leaving:
                assigned.leaving = True
            until = monotonic() + seconds
            while any(assigned.started for assigned in leaving) and (left := until - monotonic()) > 0:
                self._changed.wait(left)
            return sum(len(assigned.started) for assigned in leaving)

    def revoke(self, partitions: Iterable[int] | None = None) -> None:
        """Drop partitions with their messages in flight. None: all partitions."""
        with self._changed:
            for partition in list(self._assigned) if partitions is None else partitions:
                self._drop(partition)
            self._changed.notify_all()

    def commit_is_due(self) -> bool:
        """Whether enough messages are done to commit before the interval ends."""
        return self._done_since_commit >= _COMMIT_AFTER

    def to_commit(self, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """Return the offsets that changed since the last commit, by partition.

        They count as committed, unless `not_committed` is called.
        """
        with self._changed:
            self._done_since_commit = 0
            offsets = {}
            for partition in list(self._assigned) if partitions is None else partitions:
                assigned = self._assigned.get(partition)
                safe = assigned.safe() if assigned is not None else None
                if assigned is not None and safe is not None and safe != assigned.committed:
                    assigned.committed = offsets[partition] = safe
            return offsets

    def not_committed(self, partitions: Iterable[int]) -> None:
        """Include these partitions in the next commit, because the last one failed."""
        with self._changed:
            for partition in partitions:
                if partition in self._assigned:
                    self._assigned[partition].committed = None

    # For the event loop -----------------------------------------------------------------------------

    def holds(self, message: RawMessage) -> bool:
        """Whether this delivery is in flight and its partition is not being revoked.

        If so, the message counts as being handled.
        """
        with self._changed:
            assigned = self._find_assigned(message)
            if assigned is None:
                return False
            offset = message.metadata["offset"]
            if assigned.leaving:
                # The caller abandons the message, so the revocation need not wait for it.
                assigned.started.discard(offset)
                self._changed.notify_all()
                return False
            assigned.started.add(offset)
            return True

    def can_deliver(self, message: RawMessage) -> bool:
        """Like `holds`, for a message not yet delivered; does not mark it as being handled."""
        with self._changed:
            assigned = self._find_assigned(message)
            return assigned is not None and not assigned.leaving

    def ack(self, message: RawMessage) -> None:
        """Mark the message as done. No-op if it is not in flight."""
        with self._changed:
            assigned = self._find_assigned(message)
            if assigned is None:
                return
            offset = message.metadata["offset"]
            del assigned.in_flight[offset]
            assigned.started.discard(offset)
            self._in_flight -= 1
            self._done_since_commit += 1
            if assigned.leaving or self._in_flight == self._low_mark:
                self._changed.notify_all()

    def redeliver(self, message: RawMessage) -> int | None:
        """Keep the message in flight for another delivery.

        Returns its delivery count; None if it is not in flight.
        """
        with self._changed:
            assigned = self._find_assigned(message)
            if assigned is None:
                return None
            offset = message.metadata["offset"]
            assigned.in_flight[offset] += 1
            assigned.started.discard(offset)
            if assigned.leaving:
                self._changed.notify_all()
            return assigned.in_flight[offset]

    def done_up_to(self) -> Mapping[int, int]:
        """By partition, the offset below which all messages are done, committed or not."""
        with self._changed:
            safe = {partition: assigned.safe() for partition, assigned in self._assigned.items()}
            return {partition: offset for partition, offset in safe.items() if offset is not None}

    # ------------------------------------------------------------------------------------------------

    def _find_assigned(self, message: RawMessage) -> _PartitionOffsets | None:
        metadata = message.metadata
        assigned = self._assigned.get(metadata.get("partition", -1))
        if assigned is None or assigned.number != metadata["share"]:
            return None
        return assigned if assigned.in_flight.get(metadata["offset"]) == message.deliveries else None

    def _drop(self, partition: int) -> None:
        assigned = self._assigned.pop(partition, None)
        if assigned is not None:
            self._in_flight -= len(assigned.in_flight)
