"""The app's guards, asked about calls that become no jobs (requirement A4). Jobs are asked about at the app's desk."""

from __future__ import annotations

from holdfast.core.codec import encode_json
from holdfast.core.job import Envelope, new_job_ids
from holdfast.errors import Denied, NoLedger
from holdfast.guard.gate import Gate
from holdfast.triggers.runtime import Call

_NOBODY = Envelope(job_id="-", task="-", payload=b"{}")


class Gatekeeper:
    """Asks as if the call were a job: the event's name is the task's, what is known of the message are its arguments.

    The gate must know no tasks (`Gate(app.guard, {}, …)`): an event is none, even if it has the name of one.
    """

    def __init__(self, gate: Gate, queue_name: str, payload_limit: int) -> None:
        self._gate = gate
        self._queue = queue_name
        # The message itself is within the limit; its headers and the JSON around it come on top.
        self._limit = 4 * payload_limit

    async def ask(self, call: Call) -> None:
        """Raises `Denied`, or `GuardFailed`. Nobody can be asked to approve a call: that is a no."""
        if not self._gate.minds(_NOBODY):
            return
        envelope = Envelope(
            job_id=new_job_ids(1)[0],
            task=call.event_name,
            payload=encode_json(call.arguments(), "what guards are told of the message", self._limit),
            queue=self._queue,
            tenant_id=call.tenant_id,
            idempotency_key=call.key,
            trace_id=call.trace_id,
        )
        try:
            admitted = await self._gate.admit(envelope, "trigger")
        except NoLedger as exc:
            raise Denied(call.event_name, (str(exc),), ()) from exc
        ask = admitted.meta.ask
        if admitted.hold and ask is not None:
            reason = "people would have to approve it, which is possible only for the jobs of a holdfast task"
            raise Denied(call.event_name, (ask.reason, reason), ask.policies)
