"""What both stores keep, for how long, and where pruning has got to."""

from __future__ import annotations

from typing import Any, Final

_DAY_MS: Final = 86_400_000
#: After a fork the projector asks whether it has an entry already, so these outlive any lag, and any wish to keep less.
KEEP_ENTRIES_MS: Final = 7 * _DAY_MS

#: By tenant: creation (in the store's own terms) and id of the last job that was looked at. Whatever is older and still
#: there is kept for a reason (an open dead letter, say), and need not be looked at each time. Who starts with no marks
#: looks at everything.
Marks = dict[str, tuple[Any, str]]
