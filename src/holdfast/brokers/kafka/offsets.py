"""What a consumer has of its topic: the partitions that are its own, and the messages of each that are in hand.

Shared by two threads, the poller's and the event loop's; every method is atomic. A commit never passes a message that
is in hand: it goes up to the lowest of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count
from threading import Condition
from time import monotonic
from typing import Final

from holdfast.brokers.port import RawMessage

#: After so many messages that are done the next commit does not wait for its time.
_MANY: Final = 1_000
#: Who waits for room is woken when one in so many of all places is free: a message at a time would cost a switch of
#: threads for each.
_SHARE: Final = 4
#: Of shares. No two of a process have the same, so that no consumer takes another's message for its own.
_numbers: Final = count(1)


class _PartitionOffsets:
    """One partition, from the moment it is ours until it is not. If it comes back, it comes back as another one."""

    __slots__ = ("before", "committed", "in_hand", "leaving", "number", "position", "started")

    def __init__(self, number: int, before: int | None = None) -> None:
        self.number = number
        #: The client's position when the partition became ours, left over from an earlier assignment.
        self.before = before
        #: Where the next message is expected; None: none has come yet.
        self.position: int | None = None
        #: Offset → which delivery of it, in the order of the offsets.
        self.in_hand: dict[int, int] = {}
        #: Somebody has asked whether they are ours and was told so: they are being handed over.
        self.started: set[int] = set()
        self.leaving = False
        self.committed: int | None = None

    def safe(self) -> int | None:
        """Everything below is done."""
        return next(iter(self.in_hand), self.position)


class InFlightOffsets:
    """See the module. `limit` is how many messages may be in hand."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: So few in hand are few enough to wake who waits for room.
        self._few = limit - max(1, limit // _SHARE)
        self._changed = Condition()
        self._shares: dict[int, _PartitionOffsets] = {}
        self._in_hand = 0
        self._done_since_commit = 0

    # The poller's side ------------------------------------------------------------------------------

    def assign(self, partitions: Iterable[int], before: Mapping[int, int] | None = None) -> None:
        """They are ours now. `before`: the client's positions so far, which are of earlier assignments."""
        with self._changed:
            for partition in partitions:
                self._drop(partition)
                self._shares[partition] = _PartitionOffsets(next(_numbers), (before or {}).get(partition))

    def partitions(self) -> list[int]:
        """Those that are ours."""
        with self._changed:
            return list(self._shares)

    def reach(self, positions: Mapping[int, int]) -> None:
        """Where the client reads next: past transaction markers and aborted messages, which are never delivered.

        Every message before these positions must have gone through `take`.
        """
        with self._changed:
            for partition, position in positions.items():
                share = self._shares.get(partition)
                if share is None:
                    continue
                # Until something was read in this assignment, the client reports the position of the one before.
                is_current = position != share.before if share.position is None else position > share.position
                if is_current:
                    share.position = position

    def add(self, partition: int, offset: int) -> int | None:
        """A message has come: the number of our share, to be kept with it; None: the partition is not ours."""
        with self._changed:
            share = self._shares.get(partition)
            if share is None or share.leaving:
                return None
            if share.position is not None and offset < share.position:
                # The broker begins again further back. What came before comes again, and counts no more.
                self._drop(partition)
                share = self._shares[partition] = _PartitionOffsets(next(_numbers))
            share.position = offset + 1
            share.in_hand[offset] = 1
            self._in_hand += 1
            return share.number

    def room(self) -> int:
        """How many more may come."""
        with self._changed:
            return max(0, self._limit - self._in_hand)

    def wait_for_room(self, seconds: float) -> bool:
        """Wait until there is plenty, but not for longer; whether there is some."""
        with self._changed:
            self._changed.wait_for(lambda: self._in_hand <= self._few, seconds)
            return self._in_hand < self._limit

    def wake(self) -> None:
        """End all waiting for room early."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_handovers(self, partitions: Iterable[int], seconds: float) -> int:
        """From now on nothing of these is ours to begin with; wait until what was begun is done, but not for longer.
        How many are left."""
        with self._changed:
            shares = [self._shares[partition] for partition in partitions if partition in self._shares]
            for share in shares:
                share.leaving = True
            until = monotonic() + seconds
            while any(share.started for share in shares) and (left := until - monotonic()) > 0:
                self._changed.wait(left)
            return sum(len(share.started) for share in shares)

    def revoke(self, partitions: Iterable[int] | None = None) -> None:
        """They are no longer ours, nor is what is in hand of them. None: all."""
        with self._changed:
            for partition in list(self._shares) if partitions is None else partitions:
                self._drop(partition)
            self._changed.notify_all()

    def commit_is_due(self) -> bool:
        """Whether so much is done that it should not wait."""
        return self._done_since_commit >= _MANY

    def to_commit(self, partitions: Iterable[int] | None = None) -> dict[int, int]:
        """Partition → offset, of those where it has changed. They count as committed, unless `not_committed`."""
        with self._changed:
            self._done_since_commit = 0
            offsets = {}
            for partition in list(self._shares) if partitions is None else partitions:
                share = self._shares.get(partition)
                safe = share.safe() if share is not None else None
                if share is not None and safe is not None and safe != share.committed:
                    share.committed = offsets[partition] = safe
            return offsets

    def not_committed(self, partitions: Iterable[int]) -> None:
        """It did not work: they are to be committed again."""
        with self._changed:
            for partition in partitions:
                if partition in self._shares:
                    self._shares[partition].committed = None

    # The event loop's side --------------------------------------------------------------------------

    def holds(self, message: RawMessage) -> bool:
        """Whether this delivery is still in hand, of a partition that stays. A yes means that it is being used."""
        with self._changed:
            share = self._share_of(message)
            if share is None:
                return False
            offset = message.metadata["offset"]
            if share.leaving:
                # Whoever asks will not go on with it.
                share.started.discard(offset)
                self._changed.notify_all()
                return False
            share.started.add(offset)
            return True

    def can_deliver(self, message: RawMessage) -> bool:
        """The same, of a message that nobody has seen yet."""
        with self._changed:
            share = self._share_of(message)
            return share is not None and not share.leaving

    def ack(self, message: RawMessage) -> None:
        """Done with it. Nothing happens if it is not in hand."""
        with self._changed:
            share = self._share_of(message)
            if share is None:
                return
            offset = message.metadata["offset"]
            del share.in_hand[offset]
            share.started.discard(offset)
            self._in_hand -= 1
            self._done_since_commit += 1
            if share.leaving or self._in_hand == self._few:
                self._changed.notify_all()

    def redeliver(self, message: RawMessage) -> int | None:
        """It stays in hand, and is to be delivered once more: the number of that delivery. None: it is not ours."""
        with self._changed:
            share = self._share_of(message)
            if share is None:
                return None
            offset = message.metadata["offset"]
            share.in_hand[offset] += 1
            share.started.discard(offset)
            if share.leaving:
                self._changed.notify_all()
            return share.in_hand[offset]

    def done_up_to(self) -> Mapping[int, int]:
        """Partition → offset below which everything is done, committed or not."""
        with self._changed:
            safe = {partition: share.safe() for partition, share in self._shares.items()}
            return {partition: offset for partition, offset in safe.items() if offset is not None}

    # ------------------------------------------------------------------------------------------------

    def _share_of(self, message: RawMessage) -> _PartitionOffsets | None:
        metadata = message.metadata
        share = self._shares.get(metadata.get("partition", -1))
        if share is None or share.number != metadata["share"]:
            return None
        return share if share.in_hand.get(metadata["offset"]) == message.deliveries else None

    def _drop(self, partition: int) -> None:
        share = self._shares.pop(partition, None)
        if share is not None:
            self._in_hand -= len(share.in_hand)
