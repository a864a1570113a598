"""What the submitter knows for certain, on disk before it goes on: accepted, in doubt, refused, done by people.

The one witness that is not holdfast: checks hold the ledger against it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import msgspec

#: A receipt was seen.
ACCEPTED: Final = "accepted"
#: No answer, or one that leaves it open: submitted again, under the same key, until it is known.
IN_DOUBT: Final = "in doubt"
#: Never to be accepted.
REFUSED: Final = "refused"
#: A person's cancellation was confirmed.
CANCELLED: Final = "cancelled"
#: A person had a job that waited for its time run at once.
EXPEDITED: Final = "expedited"
#: A person had a dead letter run again, as another job.
REPLAYED: Final = "replayed"
#: A person said of an effect in doubt whether it was done.
RESOLVED: Final = "resolved"


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the journal."""

    said: str
    number: int
    job_id: str = ""
    #: Why, or through which way.
    note: str = ""
    #: When, by the clock.
    at: float = 0.0


class Journal:
    """Written line by line; what it says is in memory as well."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        #: From which all errands follow.
        self.seed = seed
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        #: The number of an errand → the jobs that receipts for it named. More than one is wrong.
        self.accepted: dict[int, set[str]] = {}
        self.numbers: dict[str, int] = {}
        #: The job → when its first receipt was seen.
        self.accepted_at: dict[str, float] = {}
        self.refused: dict[int, str] = {}
        #: Errands with a receipt, probes left out.
        self.errands = 0
        #: Submissions that had no clear answer, however they ended.
        self.doubts = 0
        #: All that were seen: an errand that is submitted twice, or again after a doubt, has several.
        self.receipts = 0
        self.cancelled: set[str] = set()
        #: The dead letter's job → the job that it was replayed as.
        self.replayed: dict[str, str] = {}
        self.resolved: dict[str, str] = {}

    def write(self, said: str, number: int, job_id: str = "", note: str = "") -> None:
        """One write of one line: whole, whatever happens to this process after it."""
        at = time.time()
        os.write(self._file, msgspec.json.encode(Line(said, number, job_id, note, at)) + b"\n")
        if said == ACCEPTED:
            self.receipts += 1
            self.errands += number >= 0 and number not in self.accepted
            self.accepted.setdefault(number, set()).add(job_id)
            self.numbers[job_id] = number
            self.accepted_at.setdefault(job_id, at)
        elif said == IN_DOUBT:
            self.doubts += 1
        elif said == REFUSED:
            self.refused[number] = note
        elif said == CANCELLED:
            self.cancelled.add(job_id)
        elif said == REPLAYED:
            self.replayed[note] = job_id
        elif said == RESOLVED:
            self.resolved[job_id] = note

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)
