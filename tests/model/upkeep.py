"""The projector writes the feed into the ledger. The reconciler restores jobs that the engine has lost."""

from __future__ import annotations

from collections.abc import Iterator

from tests.model.rules import NO_RULES, Process, Rule, Scenario
from tests.model.state import (
    CLEARED,
    ENGINE_EPOCH,
    ENTRIES,
    FEED,
    FENCE,
    IDLE,
    LEDGER_EPOCH,
    MARK,
    OPEN,
    POSITION,
    PROJECTED,
    PROJECTED_SERVER,
    PROJECTOR,
    QUEUED,
    RECONCILER,
    RECORDS,
    ROWS,
    SERVER,
    SUSPENDED,
    UNKNOWN,
    VERIFIED_LEDGER,
    WENT_BACK,
    WITNESS,
    WORK,
    Batch,
    Row,
    State,
    Step,
    Violation,
    append_entry,
    describe_batch,
    find_loss,
    kind,
    replace,
    write_batch,
)


class Projector(Process):
    """Reads a batch from the engine, writes it to the ledger, and trims the feed."""

    def __init__(self, scenario: Scenario, rules: frozenset[Rule], *, reports_losses: bool) -> None:
        super().__init__(scenario, rules)
        # With rules, opening a gate is what a loss must prevent.
        self._reports_losses = reports_losses and rules == NO_RULES

    def steps(self, state: State) -> Iterator[Step]:
        task = state[PROJECTOR]
        if task == IDLE:
            step = self._read(state)
            if step is not None:
                yield step
        elif task[0] == "batch":
            yield self._commit(state, *task[1:])
        else:
            yield self._trim(state, *task[1:])

    def _read(self, state: State) -> Step | None:
        if not self.is_verified(state, "project-gate", state[LEDGER_EPOCH]):
            return None
        feed, position = state[FEED], state[POSITION]
        last = feed[-1][0] if feed else 0
        if last == position:
            return None
        ids = [entry[0] for entry in feed]
        batch = feed[ids.index(position) + 1 :] if position in ids else find_unwritten(state)
        draft = list(state)
        draft[PROJECTOR] = ("batch", position, batch, last, state[ENGINE_EPOCH], state[LEDGER_EPOCH])
        return f"projector reads {describe_batch(batch)}", tuple(draft), WORK

    def _commit(
        self, state: State, position: int, batch: Batch, last: int, engine_epoch: int, ledger_epoch: int
    ) -> Step:
        refusal = self._find_refusal(state, position, engine_epoch, ledger_epoch)
        draft = list(state)
        if refusal:
            draft[PROJECTOR] = IDLE
            return f"projector drops its batch: {refusal}", tuple(draft), WORK
        draft[PROJECTOR] = ("trim", last, ledger_epoch)
        draft[PROJECTED], draft[PROJECTED_SERVER] = engine_epoch, state[SERVER]
        if self.scenario.has_witness:
            draft[WITNESS] = (last, state[WITNESS][1])
        if _agree(state, last):
            draft[WENT_BACK] = (0, 0)
        name = f"projector commits {describe_batch(batch)}"
        violation = write_batch(draft, batch, last)
        if violation is not None:
            return name, violation, WORK
        after = tuple(draft)
        loss = find_loss(after) if self._reports_losses else ""
        if loss:
            return name, Violation("I6", f"{name}, although the ledger has lost {loss}"), WORK
        return name, after, WORK

    def _find_refusal(self, state: State, position: int, engine_epoch: int, ledger_epoch: int) -> str:
        """Why the ledger refuses a batch that was read in these epochs, or ""."""
        if state[POSITION] != position:
            return "another position"
        if "fence" in self.rules and state[FENCE] != engine_epoch:
            return "another engine epoch"
        if "project-gate" in self.rules and state[LEDGER_EPOCH] != ledger_epoch:
            return "another ledger epoch"
        return ""

    def _trim(self, state: State, last: int, ledger_epoch: int) -> Step:
        draft = list(state)
        draft[PROJECTOR] = IDLE
        ids = [entry[0] for entry in state[FEED]]
        if last not in ids or not self.is_verified(state, "trim-gate", ledger_epoch):
            return "projector does not trim", tuple(draft), WORK
        draft[FEED] = state[FEED][max(0, ids.index(last) - self.scenario.tail) :]
        if "mark" in self.rules:
            draft[MARK] = last
        return "projector trims", tuple(draft), WORK


def find_unwritten(state: State) -> Batch:
    """The entries of the feed that the ledger has not written."""
    return tuple(entry for entry in state[FEED] if not state[ENTRIES] >> entry[0] & 1)


def _agree(state: State, last: int) -> bool:
    """Whether, after a commit up to `last`, each verified store has what the other has."""
    is_verified = state[CLEARED] == state[ENGINE_EPOCH] and state[VERIFIED_LEDGER] == state[LEDGER_EPOCH]
    return is_verified and any(entry[0] == last for entry in state[FEED])


class Reconciler(Process):
    """Compares the ledger's open jobs with a snapshot of the engine, and restores those that the engine has lost."""

    def steps(self, state: State) -> Iterator[Step]:
        task = state[RECONCILER]
        if task == IDLE:
            yield from self._take_snapshot(state)
        elif task[0] == "snapshot":
            step = self._compare(state, *task[1:])
            if step is not None:
                yield step
        else:
            yield self._restore(state, *task[1:])

    def _take_snapshot(self, state: State) -> Iterator[Step]:
        if not self.is_verified(state, "restore-gate", state[LEDGER_EPOCH]):
            return
        for job, row in enumerate(state[ROWS]):
            if kind(row) in (OPEN, SUSPENDED) and state[RECORDS][job] == UNKNOWN:
                draft = list(state)
                draft[RECONCILER] = ("snapshot", job, row, _feed_end(state))
                yield f"reconciler: job {job} is open in the ledger and unknown to the engine", tuple(draft), WORK

    def _compare(self, state: State, job: int, row: Row, end: int) -> Step | None:
        """Wait until the ledger has read up to the snapshot; the job is lost if nothing about it has changed since."""
        draft = list(state)
        unread = _find_unread(state)
        if state[ROWS][job] != row or unread is None or any(entry[2] == job for entry in unread):
            draft[RECONCILER] = IDLE
            return f"reconciler: job {job} has changed", tuple(draft), WORK
        if state[POSITION] == end or (end and state[ENTRIES] >> end & 1):
            draft[RECONCILER] = ("restore", job, kind(row), _feed_end(state), state[LEDGER_EPOCH])
            return f"reconciler: job {job} is lost", tuple(draft), WORK
        if state[PROJECTOR] == IDLE:
            draft[RECONCILER] = IDLE
            return "reconciler drops its snapshot", tuple(draft), WORK
        return None

    def _restore(self, state: State, job: int, record: int, end: int, ledger_epoch: int) -> Step:
        draft = list(state)
        draft[RECONCILER] = IDLE
        has_end = any(entry[0] == end for entry in state[FEED]) if end else not state[FEED]
        is_lost = state[RECORDS][job] == UNKNOWN and has_end
        if not is_lost or not self.is_verified(state, "restore-gate", ledger_epoch):
            return f"reconciler does not restore job {job}", tuple(draft), WORK
        draft[RECORDS] = replace(state[RECORDS], job, record)
        append_entry(draft, "restored" if record == QUEUED else "suspended", job)
        return f"reconciler restores job {job}", tuple(draft), WORK


def _feed_end(state: State) -> int:
    end: int = state[FEED][-1][0] if state[FEED] else 0
    return end


def _find_unread(state: State) -> Batch | None:
    """The entries behind the ledger's position, or None if the feed does not have the position."""
    feed, position = state[FEED], state[POSITION]
    if not position:
        unread: Batch = feed
        return unread
    ids = [entry[0] for entry in feed]
    return feed[ids.index(position) + 1 :] if position in ids else None
