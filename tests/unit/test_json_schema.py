"""The check of payloads against an announced schema agrees with the worker's decoder, and cannot be abused."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import msgspec
import pytest
from pydantic import BaseModel

from holdfast import Context, Holdfast
from holdfast.core.announcement import CURRENT_MS, AnnouncedTask, choose
from holdfast.core.json_schema import find_mismatch
from holdfast.errors import InvalidPayload
from holdfast.execution.backend import backend_of


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: float = 0.5


class Options(TypedDict, total=False):
    depth: int


class Pair(NamedTuple):
    left: int
    right: str


class Model(BaseModel):
    name: str
    point: Point | None = None


class Node(msgspec.Struct):
    value: int
    children: list[Node] = []


async def everything(
    ctx: Context,
    a: int,
    b: float = 1,
    c: str | None = None,
    d: list[Point] | None = None,
    e: dict[str, bool] | None = None,
    f: Colour = Colour.RED,
    g: Literal["x", "y"] = "x",
    h: tuple[int, str] = (1, ""),
    i: Model | None = None,
    j: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1,
    k: Options | None = None,
    n: Node | None = None,
    p: Pair | None = None,
    any_value: Any = None,
    at: datetime | None = None,
) -> None: ...


app = Holdfast("sqlite://")
app.task(name="everything")(everything)
(ANNOUNCED,) = backend_of(app).announcements()

PAYLOADS: list[Any] = [
    {"a": 1},
    {"a": True},
    {"a": 10**30},
    {"a": 1, "b": 2},
    {"a": 1, "b": "2"},
    {"a": 1, "c": None},
    {"a": 1, "c": 5},
    {"a": 1, "d": [{"x": 1}, {"x": 2, "y": 3}]},
    {"a": 1, "d": [{"y": 3}]},
    {"a": 1, "d": {"x": 1}},
    {"a": 1, "e": {"k": True}},
    {"a": 1, "e": {"k": 1}},
    {"a": 1, "f": "blue"},
    {"a": 1, "f": "green"},
    {"a": 1, "g": "y"},
    {"a": 1, "g": "z"},
    {"a": 1, "h": [1, "t"]},
    {"a": 1, "h": [1]},
    {"a": 1, "h": ["1", "t"]},
    {"a": 1, "i": {"name": "n", "point": {"x": 1}}},
    {"a": 1, "i": {"point": {"x": 1}}},
    {"a": 1, "j": 5},
    {"a": 1, "j": 6},
    {"a": 1, "k": {"depth": 1}},
    {"a": 1, "k": {"depth": "1"}},
    {"a": 1, "n": {"value": 1, "children": [{"value": 2}]}},
    {"a": 1, "n": {"value": 1, "children": [{"value": "2"}]}},
    {"a": 1, "p": [1, "r"]},
    {"a": 1, "p": ["l", "r"]},
    {"a": 1, "any_value": [{}]},
    {"a": 1, "unknown": 1},
    {},
    [1, 2],
    [],
    ["1"],
    list(range(20)),
]


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_the_check_agrees_with_the_decoder(payload: Any) -> None:
    encoded = msgspec.json.encode(payload) if payload != {"a": 10**30} else b'{"a": 1000000000000000000000000000000}'
    try:
        app.tasks["everything"].spec.decode(encoded)
        fits = True
    except InvalidPayload:
        fits = False
    try:
        assert choose("everything", encoded, [ANNOUNCED]) is ANNOUNCED
        accepted = True
    except InvalidPayload:
        accepted = False
    assert accepted is fits


def test_what_is_not_described_is_accepted_and_left_to_the_worker() -> None:
    assert choose("everything", b'{"a": 1, "at": "not a time"}', [ANNOUNCED]) is ANNOUNCED
    # An integer of JSON Schema, and of pydantic, but not of msgspec.
    assert choose("everything", b'{"a": 1.0}', [ANNOUNCED]) is ANNOUNCED
    undescribed = AnnouncedTask(task="t", queue="q", fingerprint="0a")
    assert choose("t", b'{"anything": 1}', [undescribed]) is undescribed


@pytest.mark.parametrize("payload", [b"", b"{", b"nope", b"\xff", b"[" * 5_000, b'{"a":' * 5_000], ids=range(6))
def test_what_is_not_json_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidPayload):
        choose("everything", payload, [ANNOUNCED])


def test_current_schemas_are_tried_and_older_ones_are_not() -> None:
    def announced(fingerprint: str, names: list[str], seen_at_ms: int) -> AnnouncedTask:
        schema = {"type": "object", "properties": {name: {} for name in names}, "additionalProperties": False}
        text = msgspec.json.encode(schema).decode()
        return AnnouncedTask(task="t", queue="q", fingerprint=fingerprint, schema=text, seen_at_ms=seen_at_ms)

    now_ms = 10 * CURRENT_MS
    newest, current = announced("03", ["a", "b"], now_ms), announced("02", ["a", "c"], now_ms - 1_000)
    old = announced("01", ["d"], now_ms - CURRENT_MS - 1)
    announcements = [newest, current, old]
    assert choose("t", b'{"b": 1}', announcements) is newest
    assert choose("t", b'{"c": 1}', announcements) is current
    with pytest.raises(InvalidPayload, match="unknown field 'd'"):
        choose("t", b'{"d": 1}', announcements)


def _nested(depth: int) -> Any:
    value: Any = "wrong"
    for _ in range(depth):
        value = {"next": value}
    return value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": 5, "required": 7, "properties": [], "anyOf": {"a": 1}},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
        {"$ref": "#/$defs/A", "$defs": "nothing"},
        {
            "$ref": "#/$defs/A",
            # Two equal alternatives on every level.
            "$defs": {
                "A": {
                    "anyOf": [
                        {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}}},
                        {"type": "object", "properties": {"next": {"$ref": "#/$defs/A"}}},
                    ]
                }
            },
        },
    ],
    ids=["nonsense", "endless", "dangling", "exponential"],
)
def test_a_hostile_schema_or_payload_costs_little(schema: dict[str, Any]) -> None:
    began = time.monotonic()
    find_mismatch(_nested(60), schema)
    assert time.monotonic() - began < 5
