"""The registry of all parsers: what reads bytes that another program can write.

A target decodes a list of fields. It may raise only what its callers handle. What it returns is used as its callers use
it: encoded, and stored in the form of a ledger's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from holdfast.core.job import Claim, Event, Meta, convert_meta, decode_meta
from holdfast.core.rebuild import IncompleteHistory, rebuild_job
from holdfast.core.states import State
from holdfast.core.text import clean, decode_text, too_deep
from holdfast.engine.port.jobs import EngineOptions
from holdfast.engine.redis import announcements, claims, controls, feed_entry, keys, reads, wire
from holdfast.engine.redis.intake import PendingMessage, _Adoption
from holdfast.engine.sqlite import rows
from holdfast.engine.sqlite.feed import parse_position
from holdfast.errors import InvalidOption
from holdfast.ledger.fold import INVALID_ROWS, Anomaly, fold_known, fold_optimistic
from holdfast.ledger.fold_events import feed_events, sanitize_event
from holdfast.ledger.fold_rows import anomaly_rows, dead_letter_row, event_rows, job_row
from tests.fuzz import corpus
from tests.fuzz.mutation import Fields


class Target(NamedTuple):
    """A parser."""

    name: str
    run: Callable[[Fields], object]
    corpus: Sequence[Fields]
    #: What its callers handle.
    refusals: tuple[type[Exception], ...] = ()
    #: Qualified names of the functions that it calls.
    covers: tuple[str, ...] = ()


def even(fields: Fields) -> list[bytes]:
    """Fields of a stream entry or hash: Redis returns pairs, at least one."""
    return list(fields[: len(fields) // 2 * 2]) or [b"", b""]


def field(fields: Fields, place: int) -> bytes:
    return fields[place] if place < len(fields) else b""


def text(value: bytes) -> str:
    """Text as SQLite, PostgreSQL and HTTP libraries return it."""
    return value.decode("utf-8", "replace")


ENTRY_ID: Final = b"1700000000000-0"


# Messages -------------------------------------------------------------------------------------------


def check_claim(claim: Claim) -> Claim:
    """Encode what a worker needs of a claim."""
    msgspec.json.encode(claim)
    wire.encode_record(wire.record_from_claim(claim, claim.meta, claim.attempt))
    for name in (claim.job_id, claim.task, claim.tenant_id, claim.idempotency_key, claim.trace_id):
        name.encode()
    return claim


def native(fields: Fields) -> object:
    entry = (ENTRY_ID, even(fields))
    if wire.is_native(entry[1]):
        return check_claim(wire.parse_entry(entry, 1, "default", "w1", 1, 0))
    return wire.may_be_native(entry[1])


def foreign(fields: Fields) -> object:
    return check_claim(wire.parse_foreign((ENTRY_ID, even(fields)), 1, "default", "w1", 1))


def adopted(fields: Fields) -> object:
    return check_claim(wire.parse_adopted((ENTRY_ID, even(fields)), 1, "default", "w1", 1, 0))


def adoption(fields: Fields) -> object:
    message = PendingMessage(1, (ENTRY_ID, even(fields)), 1)
    found = [_Adoption(message, "default", "w1", keep_id, EngineOptions()) for keep_id in (True, False)]
    for each in found:
        each.job_id.encode()
        each.arguments(0)
    return found


# The feed -------------------------------------------------------------------------------------------


def feed(fields: Fields) -> object:
    entry = feed_entry.parse_feed_entry([ENTRY_ID, even(fields)])
    for event in entry.events:
        check_event(event)
    return project(list(feed_events([entry], "default")))


def check_event(event: Event) -> None:
    """Each value has its type: readers compare, sort and encode them."""
    decoded = msgspec.json.decode(msgspec.json.encode(event), type=Event)
    assert (decoded.job_id, decoded.at_ms) == (event.job_id, event.at_ms)
    assert 0 <= event.attempt <= 10**9
    assert 0 <= event.retry_count <= 10**9
    assert 0 <= event.at_ms <= 10**15
    sanitize_event(event)


def project(events: list[Event]) -> object:
    """Fold as projections do: refused batches are split until the refused event is alone."""
    done: list[object] = []
    for fold in (fold_optimistic, lambda some: fold_known(some, {})):
        try:
            folded = fold(events)
            done.append([job_row(draft, "default", _instant) for draft in folded.drafts if draft.creation])
            done.append(event_rows(folded.drafts, "default", _instant))
            dead = (draft for draft in folded.drafts if draft.dead_letter)
            done.append([dead_letter_row(draft, "work", draft.events, _instant) for draft in dead])
            msgspec.json.encode(done)
        except INVALID_ROWS:
            done.append(None)
    done += [anomaly_rows([Anomaly(event, "refused")], "default", _instant) for event in map(sanitize_event, events)]
    try:
        done.append(rebuild_job("default", events))
    except (IncompleteHistory, *INVALID_ROWS):
        done.append(None)
    return done


def _instant(ms: int) -> int | None:
    return ms if ms > 0 else None


# Controls, records, sets ----------------------------------------------------------------------------


def control(fields: Fields) -> object:
    found, unreadable = controls.decode_control(even(fields))
    msgspec.json.encode(found)
    return found, unreadable


def lanes(fields: Fields) -> object:
    cache = keys.LaneCache()
    for value in fields:
        cache.set_in_use(value)
        assert all(0 < lane <= keys._MAX_LANE for lane in keys.parse_lanes(value))
    grouped = reads._group_by_tenant(even(fields), [0, 3, 1, 2])
    return cache.all(), grouped


def due(fields: Fields) -> object:
    found = [wire.instant(value) for value in fields]
    assert all(0 <= at_ms <= 10**15 for at_ms in found)
    return found


def record(fields: Fields) -> object:
    """A record, its due time."""
    reply = [field(fields, 0), b"", field(fields, 1)]
    info = reads.info_from_reply("default", "j1", reply)
    return None if info is None else msgspec.json.encode(info)


def message_record(fields: Fields) -> object:
    """A record, then the fields of its message."""
    reply = [field(fields, 0), even(fields[1:]), b"w1", 2, b"1e3"]
    info = reads.info_from_reply("default", "j1", reply)
    return None if info is None else msgspec.json.encode(info)


def merged(fields: Fields) -> object:
    return check_claim(claims.merge_record(corpus.CLAIM, field(fields, 0)))


def notice(fields: Fields) -> object:
    return reads._notice("default", wire.as_dict(even(fields)))


def announced(fields: Fields) -> object:
    found = announcements.parse_announcements(even(fields))
    return [each.document for _, each in found]


def meta(fields: Fields) -> object:
    found: list[Meta] = []
    for value in fields:
        if not too_deep(value, 200):
            found.append(decode_meta(value))
            found.append(convert_meta(msgspec.json.decode(value)))
    return msgspec.json.encode(found)


def texts(fields: Fields) -> object:
    found = [decode_text(value) for value in fields] + [
        clean(value.decode("utf-8", "surrogateescape")) for value in fields
    ]
    for each in found:
        assert "\0" not in each
        each.encode()
    return [too_deep(value, 10) for value in fields]


# SQLite rows ----------------------------------------------------------------------------------------


def sqlite_rows(fields: Fields) -> object:
    """Rows as SQLite returns them; columns of its tables are STRICT or checked, their contents are not."""
    work = rows.WORK_ROWS.decode(field(fields, 0))
    found: list[object] = [check_claim(each.to_claim("default")) for each in work]
    found += [each.to_info() for each in rows.VIEW_ROWS.decode(field(fields, 1))]
    entries = rows.group_entries(rows.EVENT_ROWS.decode(field(fields, 2)))
    project(list(feed_events(entries, "default")))
    rows.tenant_controls(text(field(fields, 3)))
    return msgspec.json.encode(found)


_STATES: Final = [state.value for state in State]
_ENTRIES: Final = [corpus.SHORT, corpus.LONG, corpus.FOREIGN, corpus.UNVERIFIED]

ENGINE: Final = [
    Target(
        "native message",
        native,
        _ENTRIES,
        (wire.MalformedMessage,),
        ("engine.redis.wire.parse_entry", "core.job.decode_meta"),
    ),
    Target("foreign message", foreign, _ENTRIES, (wire.MalformedMessage,), ("engine.redis.wire.parse_foreign",)),
    Target("adopted message", adopted, _ENTRIES, (wire.MalformedMessage,), ("engine.redis.wire.parse_adopted",)),
    Target("adoption", adoption, _ENTRIES, (), ("engine.redis.intake._Adoption._parse_native",)),
    Target(
        "feed entry",
        feed,
        corpus.FEED,
        (),
        (
            "engine.redis.feed_entry.parse_feed_entry",
            "engine.redis.feed_entry._decode_created",
            "engine.redis.feed_entry._decode_claimed",
            "engine.redis.feed_entry._decode_reclaimed",
            "engine.redis.feed_entry._decode_adopted",
            "engine.redis.feed_entry._decode_settled",
            "engine.redis.feed_entry._decode_moved",
            "engine.redis.feed_entry._decode_restored",
            "engine.redis.feed_moves.unpack_moves",
            "engine.redis.feed_moves._unpack",
            "engine.redis.feed_moves._unpack_leniently",
            "engine.redis.feed_moves.read_count",
            "engine.redis.feed_moves.read_data",
            "engine.redis.feed_moves.read_history",
            "engine.redis.feed_moves.read_instant",
            "engine.redis.feed_moves.read_meta",
        ),
    ),
    Target("control", control, [corpus.CONTROL], (), ("engine.redis.controls.decode_control",)),
    Target(
        "lanes",
        lanes,
        [(b"1 2 3", b"16"), (b"acme", b"3", b"other", b"5 1700000000000")],
        (),
        ("engine.redis.keys.parse_lanes",),
    ),
    Target("due time", due, [(b"1700000000000", b"1.7e12", b"inf")]),
    Target("record", record, corpus.RECORDS),
    Target("record of a message", message_record, [(b"1:1-1 queued -", *each) for each in _ENTRIES]),
    Target("merged record", merged, corpus.RECORDS),
    Target("notice", notice, [(b"due", b"1700000000000"), (b"cancelled", b"j1"), (b"controlled", b"1")]),
    Target(
        "announcement",
        announced,
        [(b"f work", each[0]) for each in corpus.ANNOUNCED],
        (),
        ("engine.redis.announcements.parse_announcements",),
    ),
    Target(
        "meta",
        meta,
        [(corpus.META_TEXT.encode(), corpus.OLD_META)],
        (ValueError,),
        ("core.job.convert_meta",),
    ),
    Target("text", texts, [(b"caf\xc3\xa9", b'{"a":[[[{}]]]}')], (), ("core.text.decode_text",)),
    Target(
        "feed position",
        lambda fields: [parse_position(text(value)) for value in fields],
        [(b"17", b"")],
        (InvalidOption,),
        ("engine.sqlite.feed.parse_position",),
    ),
    Target(
        "SQLite rows",
        sqlite_rows,
        [
            (
                msgspec.json.encode([corpus.WORK_ROW]),
                msgspec.json.encode([corpus.INFO_ROW]),
                msgspec.json.encode(corpus.EVENT_ROWS),
                b'{"acme":{"weight":2}}',
            )
        ],
        (ValueError,),
    ),
]
