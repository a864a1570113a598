"""What kind of error a dead letter died of: letters of one kind have the same fingerprint. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import Final

from holdfast.core.job import Failure

#: What differs from one failure to the next of the same kind: quoted words, ids, numbers.
_VARYING: Final = re.compile(r"'[^']*'|\"[^\"]*\"|\b0x[0-9a-f]+\b|\b[0-9a-f]{8,}\b|\d+", re.IGNORECASE)


def fingerprint(task: str, failure: Failure) -> str:
    """Of task, code, exception type and the message without what varies; 16 hexadecimal digits."""
    kind = _VARYING.sub("*", failure.message.partition("\n")[0])[:500]
    text = f"{task}\x00{failure.code}\x00{failure.type}\x00{kind}"
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]
