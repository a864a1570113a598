"""Every error that holdfast raises, each with a stable code.

    HoldfastError
    ├─ UsageError               the call is wrong; a retry fails the same way
    │   ├─ UnknownTask          no task of that name is registered in this process
    │   ├─ DuplicateTask        two functions have the same task name
    │   ├─ InvalidPayload       arguments that do not fit the task's annotations, or a value that is not JSON
    │   ├─ InvalidResult        a result that does not fit the return annotation, or is not JSON
    │   ├─ PayloadTooLarge      arguments, context or result over the limit
    │   ├─ InvalidOption        a negative delay, an unknown priority, a setting with an invalid value
    │   ├─ IdempotencyKeyReused the key belongs to a job of another task or with other arguments
    │   ├─ UnknownJob           no job of that id, or it has expired
    │   ├─ AmbiguousId          several ids begin with the given prefix
    │   ├─ EffectMismatch       an effect's key belongs to another function, or to other arguments
    │   ├─ NoLedger             the operation needs a ledger: tokens, approvals, dead letters
    │   └─ MissingExtra         a package of one of holdfast's extras is not installed; also an ImportError
    ├─ Denied                   a guard denied a submission
    ├─ GuardFailed              a guard raised, or did not answer in time; nothing was accepted
    ├─ Unauthorized             no token, or an invalid one
    ├─ Forbidden                the role does not allow it, or it needs two different principals
    ├─ NotFound                 nothing of that id exists, or the caller may not see it
    ├─ Conflict                 another caller was faster, or it is already decided
    │   ├─ ControlChanged       a queue's controls have changed since they were read
    │   ├─ ConcurrencyLimited   the queue runs as many jobs as its limit allows
    │   └─ ApprovalVoid         the job's payload is not the one that was approved
    ├─ SignatureInvalid         a webhook whose signature does not match, is too old, or was seen before
    ├─ TransitionInvalid        the state table does not have that move
    ├─ StaleLease               another worker owns the job now, or it has ended
    ├─ SchemaMismatch           the ledger's tables are of another release; run `holdfast migrate up`
    ├─ RunEnded                 this run was ended from outside; it may begin no further effect or step
    ├─ EffectInDoubt            an effect was begun and its outcome is unknown; an operator decides
    ├─ StepMismatch             a job's recorded steps are not the ones its code takes now
    ├─ JobFailed                the awaited job ended without a result
    │   └─ JobCancelled
    ├─ WaitTimeout              the awaited job has not ended yet; it continues
    ├─ IntakeRefused            the queue accepts no new jobs at the moment
    │   ├─ IntakeLimited        … because its backlog is at the limit
    │   ├─ QueueLimitReached    … because it is new, and its tenant has too many queues
    │   ├─ FeedFull             … because the reader of its feed is behind
    │   └─ FeedDetached         … because its feed has no reader yet; the submitter attaches one
    ├─ NotDurableYet            in the engine, but the ledger has not confirmed it in time
    ├─ Unavailable              a dependency of holdfast or of a task is down; safe to retry
    │   ├─ EngineUnavailable
    │   │   └─ EngineRefused    … and a retry may not help
    │   ├─ LedgerUnavailable
    │   │   └─ LedgerRefused    … and a retry may not help: wrong credentials, no such database
    │   └─ BrokerUnavailable    Kafka, RabbitMQ, SQS or Redis, of a trigger or of the outbox
    │       └─ BrokerRefused    … and a retry may not help: wrong credentials, no such queue
    └─ Fatal                    raised by a task: do not retry

A task raises `Fatal` for a failure that a retry cannot fix, and `Unavailable` when a dependency is down, which does not
use up retries (requirement Y8).

Messages say what to do next. Ids are attributes, so that callers need not parse a message.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import timedelta
from typing import Final


class HoldfastError(Exception):
    """Base class of all errors. `code` never changes between releases."""

    code = "HOLDFAST_ERROR"


class UsageError(HoldfastError):
    """The call is wrong; never retried."""

    code = "USAGE_ERROR"


class ReplayKeyReused(UsageError):
    """The idempotency key belongs to another replay; nothing was changed."""

    code = "REPLAY_KEY_REUSED"


class UnknownTask(UsageError):
    """No task of this name is registered in this process."""

    code = "UNKNOWN_TASK"

    def __init__(self, task: str, known: tuple[str, ...] = ()) -> None:
        names = ", ".join(known) or "none"
        super().__init__(
            f"no task named {task!r} is registered in this process (known: {names}); "
            "import the module that defines it, or fix the name"
        )
        self.task = task


class TaskNotAnnounced(UnknownTask):
    """No worker has announced a task of this name, and this process has no app that knows it."""

    code = "TASK_NOT_ANNOUNCED"

    def __init__(self, task: str, nearest: Sequence[str] = ()) -> None:
        UsageError.__init__(
            self,
            f"no worker has announced a task named {task!r}"
            + (f" (did you mean {' or '.join(map(repr, nearest))}?)" if nearest else "")
            + '; start a worker that has it, or submit with --force ("force": true over HTTP)',
        )
        self.task = task


class DuplicateTask(UsageError):
    """Two functions have the same task name."""

    code = "DUPLICATE_TASK"

    def __init__(self, task: str) -> None:
        super().__init__(f"task {task!r} is already registered; rename one with @app.task(name=…)")
        self.task = task


class InvalidPayload(UsageError):
    """Arguments that do not fit the task, or a value that cannot be written as JSON."""

    code = "INVALID_PAYLOAD"


class InvalidResult(UsageError):
    """A result that does not fit the task's return annotation, or cannot be written as JSON."""

    code = "INVALID_RESULT"


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
    """An option or setting with an invalid value."""

    code = "INVALID_OPTION"


class NameNotDistinct(UsageError):
    """The name of a new token could be mistaken for another principal's."""

    code = "NAME_NOT_DISTINCT"


class IdempotencyKeyReused(UsageError):
    """The idempotency key belongs to an earlier job with other arguments, or of another task."""

    code = "IDEMPOTENCY_KEY_REUSED"

    def __init__(self, queue: str, key: str, job_id: str) -> None:
        super().__init__(
            f"idempotency key {key!r} was used with other arguments or another task, for job {job_id} in queue "
            f'{queue!r}; use a new key, or on_key_reuse="return" to get that job'
        )
        self.queue = queue
        self.key = key
        self.job_id = job_id


class UnknownJob(UsageError):
    """Neither the engine nor the ledger has a job of this id in this queue."""

    code = "UNKNOWN_JOB"

    def __init__(self, job_id: str, advice: str = "") -> None:
        super().__init__(
            f"job {job_id!r} not found; it was never accepted, its record has expired, or it is in another queue"
            + (f"; {advice}" if advice else "")
        )
        self.job_id = job_id


class AmbiguousId(UsageError):
    """Several ids begin with the given prefix; nothing was changed."""

    code = "AMBIGUOUS_ID"

    def __init__(self, noun: str, prefix: str, count: int, *, more: bool) -> None:
        several = f"more than {count}" if more else f"{count}"
        super().__init__(f"{prefix!r} is a prefix of {several} {noun} ids; give more characters, or the whole id")
        self.prefix = prefix


class EffectMismatch(UsageError):
    """An effect's key was used before, for another function or with other arguments."""

    code = "EFFECT_MISMATCH"

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"the key {key!r} cannot be used for this effect: {reason}; include in the key what makes this effect "
            "different"
        )
        self.key = key


class NoLedger(UsageError):
    """The operation needs a ledger, and this deployment has none."""

    code = "NO_LEDGER"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs a ledger and this deployment has none; set HOLDFAST_LEDGER to postgresql://… "
            "or sqlite:///ledger.db"
        )


class MissingExtra(UsageError, ImportError):
    """A package of one of holdfast's extras is not installed."""

    code = "MISSING_EXTRA"

    def __init__(self, what: str, packages: tuple[str, ...], extras: tuple[str, ...]) -> None:
        *others, last = packages
        listed = f"{', '.join(others)} and {last}" if others else last
        install = f"pip install 'holdfast[{','.join(extras)}]'"
        super().__init__(f"{what} needs {listed}, not installed; run: {install}")
        self.extras = extras
        self.install = install


class Denied(HoldfastError):
    """A guard denied a submission; nothing was accepted."""

    code = "GUARD_DENIED"

    def __init__(self, task: str, reasons: tuple[str, ...], policies: tuple[str, ...]) -> None:
        listed = "; ".join(reasons) or "no reason given"
        super().__init__(f"a guard denied task {task!r}: {listed} (policy {', '.join(policies) or 'unnamed'})")
        self.task = task
        self.reasons = reasons
        self.policies = policies


class GuardFailed(HoldfastError):
    """A guard raised, timed out, or returned an invalid value; nothing was accepted and nothing runs."""

    code = "GUARD_FAILED"

    def __init__(self, policy: str, reason: str) -> None:
        super().__init__(f"guard {policy!r} failed, the job is not allowed to run: {reason}")
        self.policy = policy


class Unauthorized(HoldfastError):
    """No token, or an unknown, expired or revoked one; the error does not say which."""

    code = "UNAUTHORIZED"


class Forbidden(HoldfastError):
    """The role does not allow the operation, or it needs two different principals."""

    code = "FORBIDDEN"


class NotFound(HoldfastError):
    """Nothing of that id exists, or the caller may not see it."""

    code = "NOT_FOUND"

    def __init__(self, what: str, name: str, advice: str = "") -> None:
        super().__init__(f"{what} {name!r} not found" + (f"; {advice}" if advice else ""))
        self.what = what
        self.name = name
        self.advice = advice


class Conflict(HoldfastError):
    """Already decided, replayed or discarded, or changed by another caller; nothing was changed."""

    code = "CONFLICT"


class AlreadyReplayed(Conflict):
    """The latest replay of the dead letter is open or has succeeded; no job was made."""

    code = "ALREADY_REPLAYED"

    def __init__(self, dlq_id: str, job_id: str, *, pending: bool = False) -> None:
        text = (
            "and is being submitted; wait for that job"
            if pending
            else "which is open or has succeeded; wait for that job, or replay again (--again, `again`)"
        )
        super().__init__(f"dead letter {dlq_id} has been replayed as job {job_id}, {text}")
        self.dlq_id = dlq_id
        #: The job of the latest replay.
        self.job_id = job_id


class ControlChanged(Conflict):
    """A queue's controls have changed since the caller read them."""

    code = "CONTROL_CHANGED"

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"the controls of queue {queue!r} have changed since they were read; read them again and retry"
        )
        self.queue = queue


class ConcurrencyLimited(Conflict):
    """The queue runs as many jobs as its concurrency limit allows; retry when one has ended."""

    code = "CONCURRENCY_LIMITED"

    def __init__(self, queue: str, limit: int) -> None:
        super().__init__(
            f"queue {queue!r} runs as many jobs as its limit allows ({limit}); retry when one has ended, or change the "
            f"limit with `holdfast queues concurrency {shlex.quote(queue)} N`"
        )
        self.queue = queue
        self.limit = limit


class ApprovalVoid(Conflict):
    """The job's payload is not the one that the approver was shown; request a new approval."""

    code = "APPROVAL_VOID"


class SignatureInvalid(HoldfastError):
    """A webhook's signature does not match, is too old, or was seen before; answer 401 and do nothing."""

    code = "WEBHOOK_SIGNATURE_INVALID"


class TransitionInvalid(HoldfastError):
    """The state table does not have this move; nothing was changed."""

    code = "WF_STATE_TRANSITION_INVALID"

    def __init__(self, job_id: str, from_state: str | None, to_state: str) -> None:
        super().__init__(f"job {job_id}: {from_state or 'new'} → {to_state} is not a legal move; nothing was changed")
        self.job_id = job_id
        self.from_state = from_state
        self.to_state = to_state


class StaleLease(HoldfastError):
    """Another worker owns the job, or it has ended; stop without an error."""

    code = "STALE_LEASE"

    def __init__(self, job_id: str) -> None:
        super().__init__(f"the lease on job {job_id} is lost; another worker owns it, or it has ended")
        self.job_id = job_id


class SchemaMismatch(HoldfastError):
    """The ledger's tables are missing, or of another release."""

    code = "SCHEMA_MISMATCH"

    def __init__(self, where: str, found: str | None, required: str, advice: str = "") -> None:
        state = f"is at version {found}" if found else "has no tables of holdfast yet"
        if not advice:
            # Versions are numbers of equal length.
            advice = "upgrade holdfast here" if found and found > required else "run `holdfast migrate up`"
        super().__init__(f"the ledger {where} {state}, this release needs {required}; {advice}")
        self.found = found
        self.required = required


class RunEnded(HoldfastError):
    """This run was ended from outside; it may begin no further effect or step."""

    code = "RUN_ENDED"

    def __init__(self, job_id: str, what: str) -> None:
        super().__init__(
            f"{what} refused: this run of job {job_id} has ended (timeout, cancellation, lost lease or drain) and "
            "nothing was done; check ctx.cancelled in long functions"
        )
        self.job_id = job_id


class EffectInDoubt(HoldfastError):
    """An effect was begun and its outcome is unknown. The job is suspended until an operator decides."""

    code = "EFFECT_IN_DOUBT"
    #: Separates the cause from the remedy in stored messages.
    ADVICE = "; look, then `"

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(
            f"it is unknown whether {self.named(key)}: {reason}{self.ADVICE}"
            f"holdfast effects resolve {shlex.quote(key)} --done RESULT` or `--not-done`, which resumes the job"
        )
        self.key = key

    @staticmethod
    def named(key: str) -> str:
        """The part of the message that identifies the key; stored messages are searched for it."""
        return f"the effect {key!r} happened"


class StepMismatch(HoldfastError):
    """The code takes other steps than this job has recorded. The job is suspended."""

    code = "STEP_MISMATCH"


class NotDurableYet(HoldfastError):
    """The engine has a durable submission, but the ledger has not confirmed it in time.

    The job continues, unless the engine loses its data before the ledger has it.
    """

    code = "NOT_DURABLE_YET"

    def __init__(self, job_id: str, waited: timedelta) -> None:
        super().__init__(
            f"the ledger did not confirm job {job_id} within {waited.total_seconds():g} s; the engine has it, but may "
            "still lose it; check that the ledger is up and that a worker or `holdfast upkeep` runs; submitting again "
            "with the same idempotency key is safe"
        )
        self.job_id = job_id


class JobFailed(HoldfastError):
    """The awaited job ended without a result."""

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
    """The caller's timeout expired before the job ended."""

    code = "WAIT_TIMEOUT"

    def __init__(self, job_id: str, state: str, waited: timedelta) -> None:
        super().__init__(
            f"job {job_id} is still {state} after {waited.total_seconds():g} s; it was not cancelled, wait again"
        )
        self.job_id = job_id
        self.state = state


class IntakeRefused(HoldfastError):
    """The queue accepts no new jobs at the moment; jobs accepted before are safe."""

    code = "INTAKE_REFUSED"

    def __init__(self, queue: str, reason: str) -> None:
        super().__init__(f"queue {queue!r} accepts no new jobs: {reason}")
        self.queue = queue
        self.reason = reason


class IntakeLimited(IntakeRefused):
    """The backlog of the queue, or of the job's tenant in it, is at its limit; retry when jobs have finished."""

    code = "INTAKE_LIMITED"

    def __init__(
        self,
        queue: str,
        limit: int,
        backlog: int | None = None,
        tenant_id: str = "",
        *,
        fits: int = 0,
        count: int = 1,
    ) -> None:
        """`tenant_id` is empty if the limit is the queue's. `fits` of the `count` jobs of a batch would fit.

        `backlog` None: it is above the limit, and was not counted further.
        """
        self.limit = limit
        self.backlog = backlog
        self.tenant_id = tenant_id
        self.fits = fits
        #: Whether an HTTP response may have the numbers of the queue: the caller sees all tenants.
        self.is_disclosed = False
        whose = f"of tenant {tenant_id!r} " if tenant_id else ""
        numbers = f"over {limit:,}" if backlog is None else f"{backlog:,} of {limit:,}"
        capacity = f"; {fits:,} of these {count:,} jobs would fit" if count > 1 else ""
        super().__init__(queue, f"the backlog {whose}is at its limit ({numbers}){capacity}; {_WHEN_FINISHED}")

    @property
    def public(self) -> str:
        """The message for callers that see only their own tenant: without the numbers of the queue."""
        if self.tenant_id:
            return str(self)
        return f"queue {self.queue!r} accepts no new jobs: the backlog is at its limit; {_WHEN_FINISHED}"


_WHEN_FINISHED: Final = "retry when jobs have finished"


class QueueLimitReached(IntakeRefused):
    """The queue is new, and its tenant already has as many queues as a tenant may have."""

    code = "QUEUE_LIMIT_REACHED"

    def __init__(self, queue: str, tenant_id: str, limit: int) -> None:
        super().__init__(
            queue,
            # Not the tenant's name: a batch may have jobs of several tenants and callers.
            f"it is new, and the job's tenant has {limit:,} queues already, the limit (tenant_queue_limit); "
            "use one of them, or raise the limit where jobs are submitted",
        )
        self.tenant_id = tenant_id
        self.limit = limit


class FeedFull(IntakeRefused):
    """The feed is at its limit because its reader is behind. Accepted jobs continue; an alert is raised."""

    code = "FEED_FULL"


class FeedDetached(IntakeRefused):
    """The queue has a ledger, but its feed has no reader in this epoch.

    The store is new, was wiped or restarted, or a replica took over. The submitter attaches a reader.
    """

    code = "FEED_DETACHED"


class Unavailable(HoldfastError):
    """A dependency is down. If a task raises it, the job backs off without using up retries."""

    code = "UNAVAILABLE"


class EngineUnavailable(Unavailable):
    """The engine's store does not answer; jobs it accepted before are not lost."""

    code = "ENGINE_UNAVAILABLE"


class EngineRefused(EngineUnavailable):
    """The store refused a step with an unexpected error; nothing was changed, and a retry may not help."""

    code = "ENGINE_REFUSED"


class QueueUnverified(EngineUnavailable):
    """The engine was restarted or replaced, and has not been compared with the ledger since.

    Until then no job of the queue is claimed or moved, so that nothing runs again that the ledger knows as ended. Every
    worker and upkeep process compares them as soon as the ledger answers.
    """

    code = "QUEUE_UNVERIFIED"

    def __init__(self, queue: str) -> None:
        super().__init__(
            f"the jobs of queue {queue!r} wait until engine and ledger have been compared, because the engine was "
            "started or replaced; retry, and check that a worker or `holdfast upkeep` runs and reaches the ledger"
        )
        self.queue = queue


class LedgerUnavailable(Unavailable):
    """The ledger does not answer. Submission and work continue; effects, steps and queries wait for it."""

    code = "LEDGER_UNAVAILABLE"


class LedgerRefused(LedgerUnavailable):
    """The ledger's server answers and refuses: wrong user or password, no such database.

    Correct the settings. Running programs treat it as an outage, since credentials may be rotating; programs that are
    starting exit.
    """

    code = "LEDGER_REFUSED"


class BrokerUnavailable(Unavailable):
    """A message broker cannot be reached, or did not confirm in time."""

    code = "BROKER_UNAVAILABLE"


class BrokerRefused(BrokerUnavailable):
    """A broker answers and refuses: wrong credentials, no such queue, missing permission."""

    code = "BROKER_REFUSED"


class Fatal(HoldfastError):
    """Raised by a task: do not retry."""

    code = "FATAL"
