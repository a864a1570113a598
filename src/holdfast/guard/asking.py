"""A task's own question in the middle of its run (requirement A3): the answer, or the run ends until it is there.

A yes is for what was shown: the job as it is, and the question's details. Asked with other details, it is another
question, and people decide anew.
"""

from __future__ import annotations

from typing import Any, Final

from holdfast.core.codec import decode_json, encode_json
from holdfast.core.job import Ask, Claim, Consent, new_job_ids
from holdfast.core.retry import Duration
from holdfast.errors import InvalidOption
from holdfast.guard.decision import check_question, deadline_ms
from holdfast.guard.hashing import question_hash

_NAME_LIMIT: Final = 200
#: Details travel with the job and are read by people.
_DETAILS_LIMIT: Final = 64 * 1024


class Asked(BaseException):
    """Ends the attempt until people have answered. Not an `Exception`, so that a task's own handlers let it pass."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(f"waits for the approval {ask.name!r}")
        self.ask = ask


def consent_or_ask(
    claim: Claim, name: object, details: Any, *, reason: str, quorum: int, deadline: Duration | None, now_ms: int
) -> Consent:
    """People's yes to exactly this; raises `Asked` if there is none. `InvalidOption` for what cannot be asked."""
    if not isinstance(name, str) or not 1 <= len(name) <= _NAME_LIMIT or not name.isprintable():
        raise InvalidOption(f"an approval's name must be a text of 1 to {_NAME_LIMIT} characters, got {name!r}")
    check_question(reason, quorum, deadline)
    what = f"the details of approval {name!r}"
    plain = decode_json(encode_json(details, what, _DETAILS_LIMIT), what)
    shown = question_hash(claim.task, claim.tenant_id, claim.payload, name, plain)
    consent = (claim.meta.consents or {}).get(name)
    if consent is not None and consent.payload_hash == shown:
        return consent
    span_ms = deadline_ms(deadline)
    raise Asked(
        Ask(
            approval_id=new_job_ids(1)[0],
            payload_hash=shown,
            name=name,
            reason=reason,
            quorum=quorum,
            deadline_at_ms=now_ms + span_ms if span_ms else 0,
            requested_by=claim.meta.submitted_by,
            details=plain,
        )
    )
