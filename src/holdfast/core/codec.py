"""JSON encoding and decoding of arguments and results, checked against a function's annotations.

Pickle is never used. On the wire a payload is a JSON object of keyword arguments; an array of positional arguments is
accepted too. Plain types, dataclasses, msgspec structs, TypedDicts, enums and pydantic models are supported, nested or
not.
"""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable
from typing import Any, Final, NoReturn

import msgspec
import pydantic
from pydantic import BaseModel, ValidationError

from holdfast.core.fingerprint import bound_fingerprint, canonical
from holdfast.core.text import MESSAGE_DEPTH, too_deep
from holdfast.errors import InvalidOption, InvalidPayload, InvalidResult, PayloadTooLarge

PAYLOAD_LIMIT: Final = 1024 * 1024


def _encode_other(value: Any) -> Any:
    if isinstance(value, BaseModel):
        # A model that forbids unknown fields refuses its own computed ones; `round_trip` leaves them out.
        return value.model_dump(mode="json", round_trip=value.model_config.get("extra") == "forbid")
    raise TypeError(
        f"{type(value).__name__} is not JSON; use plain types, a dataclass, a msgspec struct or a pydantic model"
    )


#: Models are written by field name, so fields with an alias must be readable by name. pydantic can do so since 2.11.
_BY_NAME: Final[dict[str, Any]] = (
    {"by_name": True} if tuple(map(int, pydantic.VERSION.split(".")[:2])) >= (2, 11) else {}
)


def _decode_other(expected: Any, value: Any) -> Any:
    if isinstance(expected, type) and issubclass(expected, BaseModel):
        try:
            return expected.model_validate(value, **_BY_NAME)
        except ValidationError:
            # A strict model accepts the text of an instant as JSON, not as a Python value. msgspec turns a ValueError
            # into its own error, with the path of the field.
            return expected.model_validate_json(_plain_encoder.encode(value), **_BY_NAME)
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


def to_plain_json(value: Any, what: str, limit: int = PAYLOAD_LIMIT) -> Any:
    """The value as plain Python values, as readers of its JSON get it. Raises `InvalidPayload` or `PayloadTooLarge`.

    For what a job's `Meta` contains: nested too deeply, it could not be read back with the job.
    """
    encoded = encode_json(value, what, limit)
    if too_deep(encoded, MESSAGE_DEPTH):
        raise InvalidPayload(f"{what} is nested deeper than {MESSAGE_DEPTH} levels")
    return decode_json(encoded, what)


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
        self._function = function
        #: Canonical JSON of the defaults, computed for the first fingerprint.
        self._defaults: dict[str, bytes] | None = None
        self._known = frozenset(self.names)
        try:
            self._type = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
            self._decoder = msgspec.json.Decoder(self._type, dec_hook=_decode_other)
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

    def fingerprint(self, payload: bytes) -> str:
        """The fingerprint of a call with this payload; see `core.fingerprint`."""
        if self._defaults is None:
            parameters = inspect.signature(self._function).parameters
            self._defaults = {
                name: canonical(canonical_json(parameters[name].default))
                for name in self.names
                if parameters[name].default is not inspect.Parameter.empty
            }
        return bound_fingerprint(self._task, payload, self.names, self._defaults)

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


class Results:
    """Encoder and decoder for the results of one function, checked against its return annotation.

    A result is stored as the function returned it, if what is stored can be decoded as the annotation. If the
    annotation cannot be checked, everything that is JSON is accepted, and `unchecked` says why.
    """

    def __init__(self, function: Callable[..., Any], task: str) -> None:
        self._label = f"the result of task {task!r}"
        #: Why results are not checked; empty: they are.
        self.unchecked = ""
        self._decode: Callable[[bytes], Any] = _any_decoder.decode
        #: Types whose values always fit, so that they need not be decoded; None: nothing is checked.
        self._always_fit: frozenset[type] | None = None
        annotation: Any = function.__annotations__.get("return") if hasattr(function, "__annotations__") else None
        self._annotation = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
        try:
            annotation = _return_annotation(function)
            decode = _result_decoder(annotation)
        except Exception as exc:  # noqa: BLE001 - evaluates the user's annotations
            self.unchecked = f"{exc}"
            return
        if annotation is not object:
            self._decode = decode
            self._always_fit = _types_that_fit(annotation)

    def encode(self, value: Any, limit: int = PAYLOAD_LIMIT) -> bytes:
        """Encode a result. Raises `InvalidResult` if it does not fit, `PayloadTooLarge`."""
        try:
            encoded = encode_json(value, self._label, limit)
        except InvalidPayload as exc:
            raise InvalidResult(str(exc)) from exc
        if self._always_fit is not None and value.__class__ not in self._always_fit:
            self._read(encoded, "return what the annotation says, or change the annotation")
        return encoded

    def decode(self, result: bytes) -> Any:
        """Decode a stored result to the annotation's type.

        Raises `InvalidResult` if it does not fit: another release of the task has stored it.
        """
        return self._read(result, "app.job(…).result() returns it as plain values")

    def _read(self, result: bytes, advice: str) -> Any:
        try:
            return self._decode(result)
        except Exception as exc:
            # Decoding calls the user's validators, which may raise anything.
            raise InvalidResult(
                f"{self._label} does not fit its annotation {self._annotation}: {exc}; {advice}"
            ) from exc


def _return_annotation(function: Callable[..., Any]) -> Any:
    """The evaluated return annotation. Raises `TypeError` if results cannot be checked against it."""
    annotations = getattr(function, "__annotations__", {})
    if "return" not in annotations:
        raise TypeError("it has no return annotation")
    annotation = _evaluate(function, {"return": annotations["return"]})["return"]
    if annotation is Any:
        raise TypeError("it is annotated as Any")
    return annotation


def _result_decoder(annotation: Any) -> Callable[[bytes], Any]:
    """A decoder for a return annotation. Raises `TypeError` if values of it cannot be read from JSON."""
    if annotation in (typing.NoReturn, typing.Never):
        return _refuse_return
    decoder = msgspec.json.Decoder(annotation, dec_hook=_decode_other)
    if isinstance(info := msgspec.inspect.type_info(annotation), msgspec.inspect.AnyType):
        raise TypeError(f"{annotation} can be anything")
    _require_readable(info, set())
    return decoder.decode


def _refuse_return(_: bytes) -> NoReturn:
    raise ValueError("the function returned")


def _require_readable(info: Any, visited: set[int]) -> None:
    """Raise `TypeError` if a part of a type is a class that cannot be read from JSON."""
    if id(info) in visited:
        return
    visited.add(id(info))
    if isinstance(info, msgspec.inspect.CustomType):
        if info.cls is not object and not issubclass(info.cls, BaseModel):
            raise TypeError(f"{info.cls.__qualname__} cannot be read from JSON")
        return
    for name in info.__struct_fields__:
        value = getattr(info, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field):
                _require_readable(part, visited)


#: Values of exactly these types fit the annotation of the same type, whatever they contain. `float` does not: NaN.
_SELF_CONTAINED: Final = (int, str, bool, types.NoneType, dict, list, tuple)


def _types_that_fit(annotation: Any) -> frozenset[type]:
    """Types whose values need not be decoded to know that they fit."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return frozenset().union(*map(_types_that_fit, args))
    if origin in (dict, list) and args[-1] is Any and args[0] in (Any, str):
        annotation = origin
    return frozenset({annotation}) if any(annotation is known for known in _SELF_CONTAINED) else frozenset()


def _hints(function: Callable[..., Any], task: str) -> dict[str, Any]:
    """The evaluated annotations of the parameters."""
    annotations = getattr(function, "__annotations__", {})
    try:
        return _evaluate(function, {name: annotations[name] for name in annotations if name != "return"})
    except NameError as exc:
        raise InvalidOption(
            f"task {task!r}: {exc}; annotations must be importable where the task is defined, not under TYPE_CHECKING"
        ) from exc


def _evaluate(function: Callable[..., Any], annotations: dict[str, Any]) -> dict[str, Any]:
    """Evaluate some of a function's annotations, so that one that cannot be evaluated does not affect the others."""
    holder = types.SimpleNamespace(
        __annotations__=annotations, __type_params__=getattr(function, "__type_params__", ()), __wrapped__=function
    )
    return typing.get_type_hints(holder, include_extras=True)


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
