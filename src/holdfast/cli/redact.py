"""Nothing that this program prints may carry a password (requirement T7)."""

from __future__ import annotations

import re
from typing import Final

# Greedy up to the last "@" of the word: a password may itself hold a "@", ":" or "/".
_CREDENTIALS: Final = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)(?P<user>[^\s:@/]*):\S+@", re.IGNORECASE)
_QUERY: Final = re.compile(r"(?P<name>[?&](?:password|passwd|secret|token)=)[^&\s]+", re.IGNORECASE)


def redact(text: str) -> str:
    """The text with the passwords in its URLs blotted out.

    >>> redact("redis://app:s3cret@cache:6379/0")
    'redis://app:***@cache:6379/0'
    """
    return _QUERY.sub(r"\g<name>***", _CREDENTIALS.sub(r"\g<scheme>\g<user>:***@", text))
