"""An external yardstick: a script that produces and works, run in the same rounds as all sides.

RPORT=port python SCRIPT produce N BATCH       prints "submit …: 123,456/s"
RPORT=port python SCRIPT work N BATCH NAME     prints "worker …: done 20000 45,000/s" once the queue is empty
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.children import ANSWER_WITHIN_S, ProbeFailed
from benchmarks.stores import RedisStore

_SUBMIT_BATCH: Final = 500
_WORK_BATCH: Final = 200
_RATE: Final = re.compile(r"([\d,.]+)/s")
_DONE: Final = re.compile(r"done ([\d,]+)")


class Sketch:
    """The script and the Redis that it runs on."""

    def __init__(self, script: Path, store: RedisStore) -> None:
        self._script = script
        self.store = store

    def submit(self, jobs: int) -> float:
        """Jobs per second, by its own clock."""
        (output,) = self._run([["produce", str(jobs), str(_SUBMIT_BATCH)]])
        return _number(_RATE, output)

    def drain(self, jobs: int, workers: int) -> float:
        """Jobs per second of all its workers together: all jobs over the longest of their times."""
        output = self._run([["work", str(jobs), str(_WORK_BATCH), f"w{number}"] for number in range(workers)])
        done = [_number(_DONE, line) for line in output]
        # It submits whole batches only, so there may be a few more.
        if sum(done) < jobs:
            raise ProbeFailed(f"the yardstick finished {sum(done):,.0f} of {jobs:,} jobs")
        return sum(done) / max(count / _number(_RATE, line) for count, line in zip(done, output, strict=True) if count)

    def _run(self, calls: Sequence[Sequence[str]]) -> list[str]:
        environment = {**os.environ, "RPORT": str(self.store.port)}
        processes = [
            subprocess.Popen(
                [sys.executable, str(self._script), *call],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for call in calls
        ]
        return [_output(process) for process in processes]


def _output(process: subprocess.Popen[str]) -> str:
    try:
        output, errors = process.communicate(timeout=ANSWER_WITHIN_S)
    except subprocess.TimeoutExpired as exc:
        process.kill()
        process.communicate()
        raise ProbeFailed("the yardstick does not end") from exc
    if process.returncode:
        raise ProbeFailed(f"the yardstick ended with {process.returncode}\n{errors[-1500:]}")
    return output


def _number(pattern: re.Pattern[str], output: str) -> float:
    found = pattern.search(output)
    if found is None:
        raise ProbeFailed(f"the yardstick output {output!r}")
    return float(found[1].replace(",", ""))
