"""What an approval is for: a hash of everything that was shown, so that nothing else can run on it."""

from __future__ import annotations

import hashlib
from typing import Any

from holdfast.core.codec import fingerprint_json


def payload_hash(task: str, tenant_id: str, payload: bytes) -> str:
    """Of a job: the same for the same task, tenant and payload, byte by byte, and for no others."""
    return _hash(task.encode(), tenant_id.encode(), payload)


def question_hash(task: str, tenant_id: str, payload: bytes, name: str, details: Any) -> str:
    """Of a task's own question: the job, and what was asked about it. `details` are plain JSON values."""
    return _hash(task.encode(), tenant_id.encode(), payload, name.encode(), fingerprint_json(details))


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        # With its length: "ab" + "c" must not be "a" + "bc".
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()
