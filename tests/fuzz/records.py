"""Parsers of process records, and of /proc."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from holdfast.neighbours.host import ProcessStat, parse_stat
from holdfast.neighbours.record import SIZE, ProcessFacts, parse_facts, parse_waiting
from tests.fuzz.mutation import Fields
from tests.fuzz.targets import Target, field

_FACTS: Final = ProcessFacts(
    identity="blue@host-17-6a31000012345678",
    store="0123456789abcdef",
    queues=("default", "mail"),
    isolated=False,
    pid=17,
    started_at=123_456,
    boot_id="1b1b9c5e-8f6a-4f1e-9d8e-0123456789ab",
    host="host",
    pid_namespace=4_026_531_836,
    time_namespace=4_026_531_834,
)
_BUFFERS_AT: Final = 32_768


def record(fields: Fields) -> object:
    """A record of these facts, state and list of jobs; all parsers take a file of any content and size."""
    facts, state, listed = field(fields, 0), field(fields, 1), field(fields, 2)
    head = b"hfproc1\n" + state[:8].ljust(8, b"\0") + struct.pack("<I", len(facts)) + facts
    data = (head[:_BUFFERS_AT].ljust(_BUFFERS_AT, b"\0") + listed)[:SIZE].ljust(SIZE, b"\0")
    found, waiting = parse_facts(data), parse_waiting(data)
    if found is not None:
        assert 1 <= found.pid < 2**31
        assert len(found.queues) <= 1_000
        assert len(found.file_name) < 100
    assert len(waiting) <= SIZE
    for size in (0, 7, 19, 20, min(len(head), _BUFFERS_AT - 1)):
        assert parse_facts(data[:size]) is None
        assert len(parse_waiting(data[:size])) == 0
    return parse_facts(b"".join(fields)), parse_waiting(b"".join(fields))


def stat(fields: Fields) -> ProcessStat | None:
    return parse_stat(b" ".join(fields))


RECORDS: Final = [
    Target(
        "process record",
        record,
        [(msgspec.msgpack.encode(_FACTS), struct.pack("<Q", 12 | 1 << 24), b"job-1\0job-2\0")],
        (),
        ("neighbours.record.parse_facts", "neighbours.record.parse_waiting"),
    ),
    Target(
        "process stat",
        stat,
        [tuple(b"17 (python 3) S 1 17 17 0 -1 4194560 1 0 0 0 10 5 0 0 20 0 4 0 123456 1 2".split())],
        (),
        ("neighbours.host.parse_stat",),
    ),
]
