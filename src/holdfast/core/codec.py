"""JSON encoding and decoding of arguments and results, checked against a function's annotations.

Pickle is never used. On the wire a payload is a JSON object of keyword arguments; an array of positional arguments is
accepted too. Plain types, dataclasses, msgspec structs, TypedDicts, enums and pydantic models are supported, nested or
not.
"""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Callable
from typing import Any, Final

import msgspec
from pydantic import BaseModel

from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge

PAYLOAD_LIMIT: Final = 1024 * 1024


def _encode_other(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(
        f"{type(value).__name__} is not JSON; use plain types, a dataclass, a msgspec struct or a pydantic model"
    )


def _decode_other(expected: Any, value: Any) -> Any:
    if isinstance(expected, type) and issubclass(expected, BaseModel):
        # msgspec turns a ValueError into its own error, with the path of the field.
        return expected.model_validate(value)
    if expected is object:
        return value
    raise TypeError(
        f"{getattr(expected, '__name__', expected)} cannot be read from JSON; "
        "annotate with plain types, a dataclass, a msgspec struct or a pydantic model"
    )


_encoder: Final = msgspec.json.Encoder(enc_hook=_encode_other)
_any_decoder: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder()


def _name_other(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else f"<{type(value).__qualname__}>"


_sorting_encoder: Final = msgspec.json.Encoder(enc_hook=_name_other, order="sorted")


def encode_json(value: Any, what: str, limit: int = PAYLOAD_LIMIT) -> bytes:
    """Encode `value`. Raises `InvalidPayload` or `PayloadTooLarge`, which name `what`."""
    try:
        encoded = _encoder.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as exc:
        raise InvalidPayload(f"{what} cannot be written as JSON: {exc}") from exc
    if len(encoded) > limit:
        raise PayloadTooLarge(what, len(encoded), limit)
    return encoded


def decode_json(encoded: bytes, what: str) -> Any:
    """Decode JSON to plain Python values. Raises `InvalidPayload`."""
    try:
        return _any_decoder.decode(encoded)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise InvalidPayload(f"{what} cannot be read as JSON: {exc}") from exc


def canonical_json(value: Any) -> bytes:
    """JSON that is the same for equal values.

    Keys are sorted; values that are not JSON are replaced by the name of their type.
    """
    try:
        return _sorting_encoder.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError):
        if isinstance(value, list):
            return b"[" + b",".join(canonical_json(item) for item in value) + b"]"
        if isinstance(value, dict):
            # JSON has text keys only: other keys are written as their `repr`.
            pairs = sorted((repr(key).encode(), canonical_json(item)) for key, item in value.items())
            return b"{" + b",".join(key + b":" + item for key, item in pairs) + b"}"
        return _sorting_encoder.encode(type(value).__qualname__)


def result_decoder(function: Any) -> msgspec.json.Decoder[Any]:
    """A decoder for a function's results, typed by its return annotation.

    It decodes to plain values if the annotation is not usable.
    """
    try:
        return msgspec.json.Decoder(
            typing.get_type_hints(function, include_extras=True).get("return", Any), dec_hook=_decode_other
        )
    except (NameError, TypeError, AttributeError):
        return _any_decoder


class Arguments:
    """Encoder and decoder for the arguments of one function.

    Parameters annotated with `injected` (the task's context) are not part of the payload.
    """

    def __init__(self, function: Callable[..., Any], task: str, injected: type) -> None:
        self._task = task
        self._label = f"the arguments of task {task!r}"
        hints = _hints(function, task)
        fields: list[Any] = []
        self.injected_name: str | None = None
        for name, parameter in inspect.signature(function).parameters.items():
            annotation = hints.get(name, Any)
            if annotation is injected:
                self.injected_name = name
                continue
            fields.append(_field(task, parameter, annotation))
        self.names: tuple[str, ...] = tuple(field[0] for field in fields)
        self._known = frozenset(self.names)
        try:
            self._type = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
            self._decoder = msgspec.json.Decoder(self._type, dec_hook=_decode_other)
            self._returns = msgspec.json.Decoder(hints.get("return", Any), dec_hook=_decode_other)
        except TypeError as exc:
            raise InvalidOption(f"task {task!r}: an annotation cannot be read from JSON: {exc}") from exc

    @property
    def struct(self) -> type[msgspec.Struct]:
        """A struct type with the function's parameters as fields; schemas are generated from it."""
        return self._type

    def encode(self, args: tuple[Any, ...], kwargs: dict[str, Any], limit: int = PAYLOAD_LIMIT) -> bytes:
        """Encode a call as a payload, with the same checks that the worker makes."""
        if len(args) > len(self.names):
            raise InvalidPayload(f"task {self._task!r} takes {len(self.names)} arguments, got {len(args)}")
        bound = dict(zip(self.names, args, strict=False))
        if kwargs:
            twice = bound.keys() & kwargs.keys()
            if twice:
                raise InvalidPayload(f"task {self._task!r} got {min(twice)!r} twice")
            bound.update(kwargs)
        payload = encode_json(bound, self._label, limit)
        self._read(payload)
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        """Decode a payload to keyword arguments of the annotated types."""
        arguments = self._read(payload)
        return {name: getattr(arguments, name) for name in self.names}

    def decode_result(self, result: bytes) -> Any:
        """Decode a result to the return annotation's type, or to plain values if it no longer fits."""
        try:
            return self._returns.decode(result)
        except (msgspec.DecodeError, ValueError, TypeError):
            return _any_decoder.decode(result)

    def _read(self, payload: bytes) -> Any:
        try:
            if payload[:1] == b"[":
                return self._read_positional(payload)
            return self._decoder.decode(payload)
        except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as exc:
            raise InvalidPayload(f"the payload does not fit task {self._task!r}: {exc}") from exc

    def _read_positional(self, payload: bytes) -> Any:
        values = _any_decoder.decode(payload)
        if len(values) > len(self.names):
            raise ValueError(f"{len(values)} positional arguments for {len(self.names)} parameters")
        named = dict(zip(self.names, values, strict=False))
        return msgspec.convert(named, self._type, dec_hook=_decode_other)


def _hints(function: Callable[..., Any], task: str) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError as exc:
        raise InvalidOption(
            f"task {task!r}: {exc}; annotations must be importable where the task is defined, not under TYPE_CHECKING"
        ) from exc


def _field(task: str, parameter: inspect.Parameter, annotation: Any) -> Any:
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        raise InvalidOption(
            f"task {task!r}: parameter {parameter} has no name on the wire; "
            "give tasks named parameters, not *args, **kwargs or positional-only ones"
        )
    if parameter.default is parameter.empty:
        return (parameter.name, annotation)
    default = parameter.default
    return (parameter.name, annotation, msgspec.field(default_factory=lambda: default))


_plain_encoder: Final = msgspec.json.Encoder()


def to_json(value: Any) -> str:
    try:
        return _plain_encoder.encode(value).decode()
    except UnicodeEncodeError:
        # A lone surrogate: the standard library escapes it.
        return json.dumps(msgspec.to_builtins(value))
