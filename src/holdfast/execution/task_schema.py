"""The schema of a task's arguments as JSON Schema, and its fingerprint.

Workers announce both; submissions carry the fingerprint. Equal fingerprints mean equal schemas: a payload that does not
fit will not fit another worker with this fingerprint either. The reverse is not exact: a class that is renamed, or
another version of pydantic, may change the fingerprint.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from pydantic import BaseModel, PydanticUserError

from holdfast.core.codec import canonical_json

#: Targets of references until names are final, because msgspec and pydantic name types differently.
_STRUCTS: Final = "#/structs/{name}"
_MODELS: Final = "#/models/{model}"
_DEFINITION: Final = "#/$defs/"
_WORDS: Final = re.compile(r"[A-Za-z0-9_]+")
#: Keywords that do not decide whether a value fits.
_REMARKS: Final = frozenset({"title", "description", "examples", "default"})
#: Keywords whose values are schemas by name; the names are not keywords.
_BY_NAME: Final = frozenset({"properties", "$defs"})
_DIGITS: Final = 8

Schema = dict[str, Any]


def schemas_of(struct: type[msgspec.Struct]) -> tuple[str, dict[str, Schema]]:
    """Reference to a struct's schema, and all schemas it needs by reference. Raises if it cannot be described."""
    models: dict[type[BaseModel], None] = {}

    def collect(kind: type) -> Schema:
        if not issubclass(kind, BaseModel):
            raise NotImplementedError
        models[kind] = None
        return {"type": "object"}

    msgspec.json.schema_components([struct], schema_hook=collect)
    refs: Mapping[Any, Any] = {}
    described: Mapping[str, Any] = {}
    if models:
        # Imported here: it is slow, and most tasks have no models.
        from pydantic.json_schema import models_json_schema

        refs, described = models_json_schema([(model, "validation") for model in models], ref_template=_MODELS)
    (own,), parts = msgspec.json.schema_components(
        [struct], schema_hook=lambda kind: refs[kind, "validation"], ref_template=_STRUCTS
    )
    all_parts = {_STRUCTS.format(name=name): part for name, part in parts.items()}
    all_parts |= {_MODELS.format(model=name): part for name, part in described.get("$defs", {}).items()}
    return own["$ref"], all_parts


def resolve_refs(schema: Any, refs: Mapping[str, str]) -> Any:
    """Copy of a schema with its references replaced."""
    match schema:
        case Mapping():
            return {
                key: refs.get(value, value) if key == "$ref" else resolve_refs(value, refs)
                for key, value in schema.items()
            }
        case list() | tuple():
            return [resolve_refs(value, refs) for value in schema]
    return schema


#: Errors of types that JSON Schema cannot describe.
NOT_DESCRIBED: Final = (TypeError, NotImplementedError, KeyError, PydanticUserError)


def describe_arguments(struct: type[msgspec.Struct]) -> Schema | None:
    """The JSON Schema of a task's arguments, complete in itself; None if they cannot be described."""
    try:
        own, parts = schemas_of(struct)
        refs: dict[str, str] = {}
        for part in parts:
            if part != own:
                name = stem = "_".join(_WORDS.findall(part.rpartition("/")[2]))
                while _DEFINITION + name in refs.values():
                    name += "_"
                refs[part] = _DEFINITION + (name or stem)
        schema: Schema = resolve_refs(parts[own], refs)
        if refs:
            definitions = {ref.removeprefix(_DEFINITION): resolve_refs(parts[part], refs) for part, ref in refs.items()}
            schema = {**schema, "$defs": definitions}
        # Plain JSON values, as readers of an announcement get them.
        plain: Schema = msgspec.json.decode(msgspec.json.encode(schema))
    except (*NOT_DESCRIBED, ValueError, RecursionError):
        return None
    return plain


def fingerprint_of(struct: type[msgspec.Struct], schema: Schema | None) -> str:
    """A short hash of the schema, the same in every process and Python version.

    Of arguments that cannot be described, it covers only their names and which of them are required.
    """
    if schema is None:
        fields = [[field.encode_name, field.required] for field in msgspec.structs.fields(struct)]
        return _digest(canonical_json(fields))
    return _digest(canonical_json(_essence(schema)))


def _essence(schema: Any) -> Any:
    """The part of a schema that decides what fits; sets are sorted."""
    match schema:
        case Mapping():
            found: Schema = {}
            for key, value in schema.items():
                if key in _BY_NAME and isinstance(value, Mapping):
                    found[key] = {name: _essence(part) for name, part in value.items()}
                elif key == "required" and isinstance(value, list):
                    found[key] = sorted(value)
                elif key not in _REMARKS:
                    found[key] = _essence(value)
            return found
        case list() | tuple():
            return [_essence(value) for value in schema]
    return schema


def _digest(encoded: bytes) -> str:
    return hashlib.sha256(encoded).hexdigest()[:_DIGITS]
