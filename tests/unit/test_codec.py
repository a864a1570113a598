"""Arguments and results on the wire: valid values, invalid values, and the error messages."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, computed_field

from holdfast.core.codec import PAYLOAD_LIMIT, Arguments, Results, decode_json, encode_json
from holdfast.errors import InvalidOption, InvalidPayload, InvalidResult, PayloadTooLarge


class Ctx:
    """A stand-in for the injected context."""


@dataclass
class Point:
    x: int
    y: int = 0


class Pixel(msgspec.Struct):
    at: Point
    colour: str


class Article(BaseModel):
    id: str
    words: int = Field(ge=1)


class Note(TypedDict):
    text: str


class Shade(enum.Enum):
    DARK = "dark"


def arguments(function: Any) -> Arguments:
    return Arguments(function, "t", Ctx)


def round_trip(function: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    codec = arguments(function)
    return codec.decode(codec.encode(args, kwargs))


def test_plain_types_survive_a_round_trip() -> None:
    def task(a: int, b: str, c: list[float], d: dict[str, bool], e: None, f: datetime) -> None: ...

    at = datetime(2026, 1, 2, tzinfo=UTC)
    assert round_trip(task, 1, "ü", [1.5], {"k": True}, None, f=at) == {
        "a": 1,
        "b": "ü",
        "c": [1.5],
        "d": {"k": True},
        "e": None,
        "f": at,
    }


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (Point, Point(1, 2)),
        (Pixel, Pixel(Point(1), "red")),
        (Article, Article(id="a", words=3)),
        (list[Article], [Article(id="a", words=3)]),
        (dict[str, Point], {"p": Point(4)}),
        (Note, {"text": "hi"}),
        (Shade, Shade.DARK),
        (Article | None, None),
        (tuple[int, str], (1, "x")),
    ],
    ids=str,
)
def test_models_survive_a_round_trip(annotation: Any, value: Any) -> None:
    def task(value: Any) -> None: ...

    task.__annotations__["value"] = annotation
    assert round_trip(task, value) == {"value": value}


def test_pydantic_models_inside_other_models() -> None:
    @dataclass
    class Shelf:
        articles: list[Article]

    def task(shelf: Any) -> None: ...

    task.__annotations__["shelf"] = Shelf
    assert round_trip(task, Shelf([Article(id="a", words=1)]))["shelf"].articles[0].words == 1


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(), st.lists, max_leaves=20))
def test_untyped_arguments_accept_any_json(value: Any) -> None:
    def task(value) -> None: ...  # type: ignore[no-untyped-def]

    assert round_trip(task, value) == {"value": value}


def test_object_is_treated_as_any() -> None:
    def task(values: dict[str, object]) -> None: ...

    assert round_trip(task, {"a": [1, None]}) == {"values": {"a": [1, None]}}


def test_large_integers_and_empty_lists_survive_a_round_trip() -> None:
    def task(n: int, items: list[int]) -> None: ...

    assert round_trip(task, 12345678901234567, []) == {"n": 12345678901234567, "items": []}


def test_defaults_are_filled_in_where_the_task_runs() -> None:
    def task(a: int, b: int = 5, *, c: str = "x") -> None: ...

    codec = arguments(task)
    assert codec.encode((1,), {}) == b'{"a":1}'
    assert codec.decode(b'{"a":1}') == {"a": 1, "b": 5, "c": "x"}


def test_positional_payloads_are_accepted_too() -> None:
    def task(a: int, article: Article, b: int = 5) -> None: ...

    codec = arguments(task)
    assert codec.decode(b'[1,{"id":"x","words":2}]') == {"a": 1, "article": Article(id="x", words=2), "b": 5}
    with pytest.raises(InvalidPayload, match="4 positional arguments for 3"):
        codec.decode(b"[1,2,3,4]")
    with pytest.raises(InvalidPayload):
        codec.decode(b'["no number",{"id":"x","words":2}]')


def test_the_context_is_injected_and_not_on_the_wire() -> None:
    def task(a: int, ctx: Ctx, b: int) -> None: ...

    codec = arguments(task)
    assert codec.injected_name == "ctx"
    assert codec.names == ("a", "b")
    assert codec.decode(codec.encode((1, 2), {})) == {"a": 1, "b": 2}
    assert arguments(lambda: None).injected_name is None


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b'{"a":"one","article":{"id":"x","words":1}}', r"\$\.a"),
        (b'{"a":1}', "article"),
        (b'{"a":1,"article":{"id":"x","words":1},"c":2}', "unknown field `c`"),
        (b'{"a":1,"article":{"id":"x","words":0}}', r"greater than or equal to 1"),
        (b'{"a":1.5,"article":{"id":"x","words":1}}', "int"),
        (b"null", "object"),
        (b"7", "object"),
        (b"", "t"),
        (b"{", "t"),
        (b'{"a":\xff}', "t"),
        (b"[" * 100_000, "t"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_payload_is_reported_with_its_path(payload: bytes, message: str) -> None:
    def task(a: int, article: Article) -> None: ...

    with pytest.raises(InvalidPayload, match=message) as caught:
        arguments(task).decode(payload)
    assert "task 't'" in str(caught.value)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        pytest.param((), {}, id="missing"),
        pytest.param(("one",), {}, id="wrong type"),
        pytest.param((1, 2), {}, id="too many"),
        pytest.param((1,), {"a": 1}, id="twice"),
        pytest.param((), {"b": 1}, id="unknown"),
        pytest.param((object(),), {}, id="not json"),
        pytest.param(({1, 2, 3},), {}, id="a set"),
        pytest.param((float("nan"),), {}, id="not a number"),
    ],
)
def test_an_invalid_call_fails_at_the_caller(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def task(a: int) -> None: ...

    with pytest.raises(InvalidPayload):
        arguments(task).encode(args, kwargs)


def test_a_recursive_value_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidPayload, match="cannot be written as JSON"):
        encode_json(loop, "the result")


def test_the_payload_limit_is_exact_and_settable() -> None:
    def task(a: str) -> None: ...

    codec = arguments(task)
    overhead = len(b'{"a":""}')
    assert len(codec.encode(("x" * (100 - overhead),), {}, limit=100)) == 100
    with pytest.raises(PayloadTooLarge) as caught:
        codec.encode(("x" * (101 - overhead),), {}, limit=100)
    assert (caught.value.size, caught.value.limit) == (101, 100)
    assert PAYLOAD_LIMIT == 1024 * 1024
    with pytest.raises(PayloadTooLarge):
        codec.encode(("x" * PAYLOAD_LIMIT,), {})


@pytest.mark.parametrize("bad", ["*args: int", "**kwargs: int", "a: int, /"])
def test_parameters_without_a_name_on_the_wire_are_refused(bad: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def task({bad}) -> None: ...", scope)  # noqa: S102
    with pytest.raises(InvalidOption, match="no name on the wire"):
        arguments(scope["task"])


def test_an_unresolvable_annotation_is_refused_at_registration() -> None:
    def task(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(InvalidOption, match="Nowhere"):
        arguments(task)


def test_an_annotation_that_cannot_be_decoded_from_json_is_refused() -> None:
    def task(a: Any) -> None: ...

    task.__annotations__["a"] = Point | Pixel
    with pytest.raises(InvalidOption, match="cannot be read from JSON"):
        arguments(task)


def test_an_unsupported_class_is_reported_with_alternatives() -> None:
    def task(a: Ctx | None, b: int) -> None: ...

    with pytest.raises(InvalidPayload, match="pydantic model"):
        arguments(task).decode(b'{"a":{},"b":1}')


@pytest.mark.parametrize(
    ("returns", "value", "encoded"),
    [
        (int, 5, b"5"),
        (Point, Point(1, 2), b'{"x":1,"y":2}'),
        (Article, Article(id="a", words=2), b'{"id":"a","words":2}'),
        (list[Pixel], [Pixel(Point(1), "red")], b'[{"at":{"x":1,"y":0},"colour":"red"}]'),
        (None, None, b"null"),
    ],
    ids=str,
)
def test_results_are_decoded_by_their_annotation(returns: Any, value: Any, encoded: bytes) -> None:
    def task() -> Any: ...

    task.__annotations__["return"] = returns
    results = Results(task, "t")
    assert results.encode(value) == encoded
    assert results.decode(encoded) == value


def test_a_stored_result_that_does_not_fit_its_annotation_is_refused() -> None:
    def task() -> int: ...  # type: ignore[empty-body]

    with pytest.raises(InvalidResult, match="does not fit its annotation int"):
        Results(task, "t").decode(b'{"was":"something else"}')


class Aliased(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    at: datetime = Field(alias="created at")
    shade: Shade = Field(serialization_alias="colour")
    size: int = Field(0, alias="how large")

    @computed_field
    def year(self) -> int:
        return self.at.year


@pytest.mark.parametrize("annotation", [Aliased, list[Aliased], Aliased | None], ids=str)
def test_a_strict_model_with_aliases_and_computed_fields_can_be_read_again(annotation: Any) -> None:
    def task(a: Any) -> Any: ...

    task.__annotations__ = {"a": annotation, "return": annotation}
    made: Any = Aliased.model_validate(
        {"created at": datetime(2026, 1, 2, tzinfo=UTC), "shade": Shade.DARK, "how large": 3}
    )
    value = [made] if annotation == list[Aliased] else made
    assert round_trip(task, value) == {"a": value}
    results = Results(task, "t")
    assert results.decode(results.encode(value)) == value


@given(
    st.sampled_from([int, str, bool, None, dict, list, tuple, dict[str, Any], list[Any], int | None, str | list[Any]]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text() | st.integers(), inner),
        max_leaves=5,
    ),
)
def test_the_short_test_of_a_result_says_the_same_as_decoding_it(annotation: Any, value: Any) -> None:
    def task() -> Any: ...

    task.__annotations__["return"] = annotation
    results = Results(task, "t")
    try:
        encoded = results.encode(value)
    except InvalidResult:
        with pytest.raises((msgspec.DecodeError, TypeError, ValueError)):
            msgspec.json.decode(encode_json(value, "the result"), type=annotation)
    else:
        results.decode(encoded)
        msgspec.json.decode(encoded, type=annotation)


@pytest.mark.parametrize(
    "result", [object(), {"a": [object()]}, "text".encode, {(1, 2): 3}], ids=["object", "nested", "method", "tuple key"]
)
def test_a_result_that_is_not_json_is_named(result: Any) -> None:
    with pytest.raises(InvalidPayload, match="the result of task 't'"):
        encode_json(result, "the result of task 't'")


@pytest.mark.parametrize("encoded", [b"", b"{", b'"\xff"', b"nope", b"[" * 100_000], ids=lambda value: str(value)[:20])
def test_text_that_is_not_json_is_named(encoded: bytes) -> None:
    with pytest.raises(InvalidPayload, match="context cannot be read as JSON"):
        decode_json(encoded, "context")


def test_plain_json_is_read() -> None:
    assert decode_json(b'{"a":[1,null]}', "context") == {"a": [1, None]}
