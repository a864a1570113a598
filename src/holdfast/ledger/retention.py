"""What both stores keep, and for how long."""

from __future__ import annotations

from typing import Final

_DAY_MS: Final = 86_400_000
#: After a fork the projector asks whether it has an entry already, so these outlive any lag, and any wish to keep less.
KEEP_ENTRIES_MS: Final = 7 * _DAY_MS
