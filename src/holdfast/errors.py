"""Every error that holdfast raises, each with a stable code.

    HoldfastError
    ├─ UsageError               the caller is wrong; trying again changes nothing
    │   ├─ UnknownTask          no task of that name is registered here
    │   ├─ DuplicateTask        two functions under one name
    │   ├─ InvalidPayload       arguments that do not fit the task's annotations, or a result that is no JSON
    │   ├─ PayloadTooLarge      over the limit
    │   ├─ InvalidOption        a negative delay, an unknown priority, a setting that cannot be
    │   ├─ UnknownJob           no job of that id (or it has expired)
    │   ├─ AmbiguousId          a prefix that several ids begin with
    │   ├─ EffectMismatch       an effect's key belongs to another function, or to other arguments
    │   ├─ NoLedger             people need a ledger: tokens, approvals, dead letters
    │   └─ MissingExtra         a package of one of holdfast's extras is not installed; also an ImportError
    ├─ Denied                   a guard says no to a submission
    ├─ GuardFailed              a guard raised, or did not answer in time: nothing passes
    ├─ Unauthorized             no token, or one that is not valid
    ├─ Forbidden                a role that may not, or the same person twice
    ├─ Unknown                  nothing of that id here, or nothing that this caller may see
    ├─ Conflict                 somebody else was faster, or it is decided already
    │   ├─ ControlChanged       a queue's controls are no longer as they were seen
    │   └─ ApprovalVoid         what was shown to the approver is not what would run
    ├─ SignatureInvalid         a webhook that is not holdfast's, or not fresh
    ├─ TransitionInvalid        the state table does not know that move
    ├─ StaleLease               someone else owns the job now
    ├─ SchemaMismatch           the ledger's tables are of another release; run `holdfast migrate up`
    ├─ RunOver                  this run has ended from outside; it may begin no effect and no step any more
    ├─ EffectInDoubt            nobody knows whether an effect happened; a person decides
    ├─ StepMismatch             a job's recorded steps are not the ones its code takes now
    ├─ JobFailed                the job a caller waits for ended without a result
    │   └─ JobCancelled
    ├─ WaitTimeout              the job a caller waits for has not ended yet; it goes on
    ├─ IntakeRefused            the queue takes no new jobs at the moment
    │   ├─ IntakeLimited        … because so many wait already
    │   ├─ FeedFull             … because nobody reads its feed
    │   └─ FeedUnread           … because its feed has no reader yet; the ledger registers one
    ├─ NotDurableYet            accepted, but the ledger has not confirmed it in time
    └─ Unavailable              something holdfast or a task depends on is down; safe to try again
        ├─ EngineUnavailable
        │   └─ EngineRefused    … in a way that trying again may not mend
        ├─ LedgerUnavailable
        └─ BrokerUnavailable    Kafka, RabbitMQ, SQS or Redis, of a trigger or of the outbox
            └─ BrokerRefused    … in a way that trying again may not mend: credentials, a queue that is not there

A task raises `Fatal` to say "do not retry", `Unavailable` to say "a dependency is down, this is not
my fault" (requirement Y8).

Messages say what to do next; ids are attributes, so that nobody has to parse a message.
"""

from __future__ import annotations

import shlex
from datetime import timedelta


class HoldfastError(Exception):
    """Base of all of them. `code` never changes between releases."""

    code = "HOLDFAST_ERROR"


class UsageError(HoldfastError):
    """The caller is wrong; never retried."""

    code = "USAGE_ERROR"


class UnknownTask(UsageError):
    """No task of this name is registered."""

    code = "UNKNOWN_TASK"

    def __init__(self, task: str, known: tuple[str, ...] = ()) -> None:
        names = ", ".join(known) or "none"
        super().__init__(
            f"no task named {task!r} is registered here (known: {names}); "
            "import the module that defines it, or fix the name"
        )
        self.task = task


class DuplicateTask(UsageError):
    """Two functions claim the same name on the wire."""

    code = "DUPLICATE_TASK"

    def __init__(self, task: str) -> None:
        super().__init__(f"a task named {task!r} is registered already; give one of them @app.task(name=…)")
        self.task = task


class InvalidPayload(UsageError):
    """Arguments that do not fit the task, or a value that is no JSON."""

    code = "INVALID_PAYLOAD"


class PayloadTooLarge(UsageError):
    """Arguments, context or result over the limit."""

    code = "PAYLOAD_TOO_LARGE"

    def __init__(self, what: str, size: int, limit: int) -> None:
        super().__init__(
            f"{what} has {size:,} bytes, the limit is {limit:,}; "
            "pass a reference instead of the data, or raise HOLDFAST_PAYLOAD_LIMIT"
        )
        self.size = size
        self.limit = limit


class InvalidOption(UsageError):
    """An option or setting that cannot be."""

    code = "INVALID_OPTION"


class UnknownJob(UsageError):
    """The engine has no job of this id."""

    code = "UNKNOWN_JOB"

    def __init__(self, job_id: str, advice: str = "") -> None:
        super().__init__(
            f"no job {job_id!r} here; it was never accepted, its record has expired, or it is in another queue"
            + (f"; {advice}" if advice else "")
        )
        self.job_id = job_id


class AmbiguousId(UsageError):
    """The beginning of several ids; nothing was changed."""

    code = "AMBIGUOUS_ID"

    def __init__(self, noun: str, prefix: str, count: int, *, more: bool) -> None:
        several = f"more than {count}" if more else f"{count}"
        super().__init__(f"{prefix!r} is the beginning of {several} {noun} ids; give more characters, or the whole id")
        self.prefix = prefix


class EffectMismatch(UsageError):
    """An effect's key was used before, for something else."""

    code = "EFFECT_MISMATCH"

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"the key {key!r} cannot be used for this effect: {why}; a key names one effect, so put into it whatever "
            "makes this one different"
        )
        self.key = key


class NoLedger(UsageError):
    """What was asked for is kept in the ledger, and this deployment has none."""

    code = "NO_LEDGER"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs a ledger, and this deployment has none; set HOLDFAST_LEDGER to postgresql://… "
            "or sqlite:///ledger.db"
        )


class MissingExtra(UsageError, ImportError):
    """A package that comes with one of holdfast's extras is not installed."""

    code = "MISSING_EXTRA"

    def __init__(self, what: str, packages: tuple[str, ...], extras: tuple[str, ...]) -> None:
        *others, last = packages
        listed = f"{', '.join(others)} and {last}" if others else last
        install = f"pip install 'holdfast[{','.join(extras)}]'"
        super().__init__(f"{what} needs {listed}, not installed here; run: {install}")
        self.extras = extras
        self.install = install


class Denied(HoldfastError):
    """A guard refused a submission; nothing was accepted."""

    code = "GUARD_DENIED"

    def __init__(self, task: str, reasons: tuple[str, ...], policies: tuple[str, ...]) -> None:
        why = "; ".join(reasons) or "no reason given"
        super().__init__(f"a guard refuses task {task!r}: {why} (policy {', '.join(policies) or 'unnamed'})")
        self.task = task
        self.reasons = reasons
        self.policies = policies


class GuardFailed(HoldfastError):
    """A guard raised, did not answer in time, or answered nonsense; so nothing was accepted, and nothing runs."""

    code = "GUARD_FAILED"

    def __init__(self, policy: str, why: str) -> None:
        super().__init__(f"the guard {policy!r} failed, so the job may not pass: {why}")
        self.policy = policy


class Unauthorized(HoldfastError):
    """No token was given, or one that is unknown, expired or revoked: all the same to whoever asks."""

    code = "UNAUTHORIZED"


class Forbidden(HoldfastError):
    """This person may not do that: the role does not allow it, or two different people are needed."""

    code = "FORBIDDEN"


class NotFound(HoldfastError):
    """Nothing of that id, or nothing that this caller may know of."""

    code = "NOT_FOUND"

    def __init__(self, what: str, name: str, advice: str = "") -> None:
        super().__init__(f"there is no {what} {name!r} here" + (f"; {advice}" if advice else ""))
        self.what = what
        self.name = name
        self.advice = advice


class Conflict(HoldfastError):
    """It cannot be done any more: decided, replayed or discarded already, or changed by somebody else meanwhile."""

    code = "CONFLICT"


class ControlChanged(Conflict):
    """A queue's controls are no longer as the caller saw them; look again."""

    code = "CONTROL_CHANGED"

    def __init__(self, queue: str) -> None:
        super().__init__(f"somebody else changed the controls of queue {queue!r} meanwhile; look, and try again")
        self.queue = queue


class ApprovalVoid(Conflict):
    """The job's payload is not the one that was shown to the approver; a new approval has to be asked for."""

    code = "APPROVAL_VOID"


class SignatureInvalid(HoldfastError):
    """A webhook's signature does not fit, is too old, or was seen before; the receiver answers 401 and does nothing."""

    code = "WEBHOOK_SIGNATURE_INVALID"


class TransitionInvalid(HoldfastError):
    """The state table does not know this move; nothing was changed."""

    code = "WF_STATE_TRANSITION_INVALID"

    def __init__(self, job_id: str, from_state: str | None, to_state: str) -> None:
        super().__init__(f"job {job_id}: {from_state or 'new'} → {to_state} is not a legal move; nothing was changed")
        self.job_id = job_id
        self.from_state = from_state
        self.to_state = to_state


class StaleLease(HoldfastError):
    """Someone else owns the job; stop quietly."""

    code = "STALE_LEASE"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the lease on job {job_id} is lost; another worker owns it, or it has ended")
        self.job_id = job_id


class SchemaMismatch(HoldfastError):
    """The ledger's tables are missing, or of another release."""

    code = "SCHEMA_MISMATCH"

    def __init__(self, where: str, found: str | None, wanted: str, advice: str = "") -> None:
        state = f"is at version {found}" if found else "has no tables of holdfast yet"
        if not advice:
            # Versions are numbers of equal length.
            advice = "upgrade holdfast here" if found and found > wanted else "run `holdfast migrate up`"
        super().__init__(f"the ledger {where} {state}, this release needs {wanted}; {advice}")
        self.found = found
        self.wanted = wanted


class RunEnded(HoldfastError):
    """This run has timed out, was cancelled or has lost its lease: it may begin no effect and no step any more."""

    code = "RUN_ENDED"

    def __init__(self, job_id: str, what: str) -> None:
        super().__init__(
            f"{what} was refused: this run of job {job_id} is over (it ran out of time, was cancelled, lost its lease, "
            "or its worker drains), and nothing was done; a function that may run long looks at ctx.cancelled"
        )
        self.job_id = job_id


class EffectInDoubt(HoldfastError):
    """An effect was begun and its end is unknown. The job is suspended until a person decides."""

    code = "EFFECT_IN_DOUBT"
    #: What follows in a message is what to do, not what happened.
    ADVICE = "; look, then `"

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"nobody knows whether {self.named(key)}: {why}{self.ADVICE}"
            f"holdfast effects resolve {shlex.quote(key)} --done RESULT` or `--not-done`, which resumes the job"
        )
        self.key = key

    @staticmethod
    def named(key: str) -> str:
        """The words of the message by which a job that waits for this key is known."""
        return f"the effect {key!r} happened"


class StepMismatch(HoldfastError):
    """The code takes other steps than the ones that this job has recorded. The job is suspended."""

    code = "STEP_MISMATCH"


class NotDurableYet(HoldfastError):
    """A durable submission was accepted by the engine; the ledger has not confirmed it in time. It goes on."""

    code = "NOT_DURABLE_YET"

    def __init__(self, job_id: str, waited: timedelta) -> None:
        super().__init__(
            f"job {job_id} is accepted, but after {waited.total_seconds():g} s the ledger does not have it yet; "
            "check that the ledger is up and that a worker or `holdfast upkeep` runs; submitting again with the "
            "same idempotency key is safe"
        )
        self.job_id = job_id


class JobFailed(HoldfastError):
    """The job ended in `failed`, or is parked where it can give no result."""

    code = "JOB_FAILED"

    def __init__(self, job_id: str, state: str, error_code: str | None, message: str | None) -> None:
        super().__init__(f"job {job_id} is {state}: {error_code or 'no error recorded'}: {message or ''}".rstrip(": "))
        self.job_id = job_id
        self.state = state
        self.error_code = error_code


class JobCancelled(JobFailed):
    """The job was cancelled."""

    code = "JOB_CANCELLED"


class WaitTimeout(HoldfastError):
    """The caller's patience ended before the job did."""

    code = "WAIT_TIMEOUT"

    def __init__(self, job_id: str, state: str, waited: timedelta) -> None:
        super().__init__(
            f"job {job_id} is still {state} after {waited.total_seconds():g} s; it goes on, ask again later"
        )
        self.job_id = job_id
        self.state = state


class IntakeRefused(HoldfastError):
    """The queue takes no new jobs at the moment; what was accepted before is safe."""

    code = "INTAKE_REFUSED"

    def __init__(self, queue: str, why: str) -> None:
        super().__init__(f"queue {queue!r} takes no new jobs: {why}")
        self.queue = queue
        self.reason = why


class IntakeLimited(IntakeRefused):
    """So many jobs are in line or running already; try again when some have ended."""

    code = "INTAKE_LIMITED"


class FeedFull(IntakeRefused):
    """The feed is at its limit because its reader is behind. What was accepted goes on; an alert is due."""

    code = "FEED_FULL"


class FeedDetached(IntakeRefused):
    """The queue has a ledger, but its feed has no reader yet: the store is new, was wiped or restarted, or a replica
    took over. The submitter sees to it."""

    code = "FEED_DETACHED"


class Unavailable(HoldfastError):
    """Something is down. Raised by a task, it backs off without using up retries."""

    code = "UNAVAILABLE"


class EngineUnavailable(Unavailable):
    """The engine's store does not answer; what it accepted before is not lost."""

    code = "ENGINE_UNAVAILABLE"


class EngineRefused(EngineUnavailable):
    """The store refused a step in a way that nobody foresaw; nothing was changed, and trying again may not help."""

    code = "ENGINE_REFUSED"


class LedgerUnavailable(Unavailable):
    """The ledger does not answer. Submission and work go on; effects, steps and queries wait for it."""

    code = "LEDGER_UNAVAILABLE"


class LedgerRefused(LedgerUnavailable):
    """The ledger's server answers and says no: wrong user or password, no such database. Settings have to change.

    Programs that run already wait it out like an outage, since credentials may be rotating; commands that start with it
    end.
    """

    code = "LEDGER_REFUSED"


class BrokerUnavailable(Unavailable):
    """A message broker cannot be reached, or did not confirm in time."""

    code = "BROKER_UNAVAILABLE"


class BrokerRefused(BrokerUnavailable):
    """A broker answers, and says no: wrong credentials, no such queue, no right to it."""

    code = "BROKER_REFUSED"


class Fatal(HoldfastError):
    """Raised by a task: this will never work, do not retry."""

    code = "FATAL"
