"""The OpenAPI document as HTML: operations by tag, then all schemas.

Each operation has its parameters, its responses and a curl command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote

import msgspec

from holdfast.http.html import Html, code, element, fold, join, link, prose, table

_LIMITS: Final = {
    "minimum": "at least {}",
    "maximum": "at most {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}

TOKEN_HEADER: Final = '-H "authorization: Bearer $TOKEN"'

Schema = Mapping[str, Any]


def render(document: Mapping[str, Any], *, with_token: bool) -> Html:
    """Render the document below its title. `with_token`: the examples send a token."""
    tags = [tag["name"] for tag in document["tags"]]
    # Most readers need the operations on jobs, so they come first.
    by_tag: dict[str, list[Html]] = {tag: [] for tag in sorted(tags, key=lambda tag: tag != "jobs")}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            (tag,) = operation["tags"]
            by_tag[tag].append(_operation(method.upper(), path, operation, with_token=with_token))
    schemas = document["components"]["schemas"]
    return join(
        element("nav", [link(tag, f"#{tag}") for tag in by_tag], [link("schemas", "#schemas")]),
        [join(element("h2", tag, id=tag), operations) for tag, operations in by_tag.items()],
        element("h2", "schemas", id="schemas"),
        [_schema(name, schemas[name]) for name in sorted(schemas)],
    )


def schema_id(ref: str) -> str:
    """Element id of a schema on the page, from a reference or a name."""
    return f"schema-{ref.rpartition('/')[2]}"


# Operations ----------------------------------------------------------------------------------------------


def _operation(method: str, path: str, operation: Mapping[str, Any], *, with_token: bool) -> Html:
    title = join(
        element("span", method, class_=f"method {method}"),
        code(path),
        element("span", prose(operation["summary"]), class_="dim"),
    )
    example = join(element("h3", "Example"), element("pre", _curl(method, path, operation, with_token=with_token)))
    return fold(title, *_details(operation), example, *_examples(operation), anchor=operation["operationId"])


def _details(operation: Mapping[str, Any]) -> Iterator[Html]:
    if "description" in operation:
        yield element("p", prose(operation["description"]))
    if "security" not in operation:
        yield element("p", "No token required.", class_="dim")
    if parameters := operation["parameters"]:
        yield element("h3", "Parameters")
        rows = [
            (code(each["name"]), each["in"], _kind(each["schema"]), _remarks(each, needed=each["required"]))
            for each in parameters
        ]
        yield table(("name", "in", "type", ""), rows)
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield element("h3", "Body")
        yield element("p", code(media), " ", _kind(content["schema"]))
    yield element("h3", "Responses")
    yield table(("status", "", ""), [_answer(*each) for each in operation["responses"].items()])


def _examples(operation: Mapping[str, Any]) -> Iterator[Html]:
    for status, response in operation["responses"].items():
        for content in response.get("content", {}).values():
            if status.startswith("2") and "example" in content:
                yield element("p", f"Response {status}:", class_="dim")
                yield element("pre", _example(content["example"]))


def _answer(status: str, response: Mapping[str, Any]) -> tuple[Html, Html, Html]:
    content = response.get("content", {})
    kinds = [_kind(each["schema"]) if media.endswith("json") else code(media) for media, each in content.items()]
    return code(status), join(kinds), prose(response["description"])


def _curl(method: str, path: str, operation: Mapping[str, Any], *, with_token: bool) -> str:
    for parameter in operation["parameters"]:
        if parameter["in"] == "path":
            path = path.replace(f"{{{parameter['name']}}}", quote(str(parameter["example"]), safe="") or "NAME")
    streams = operation["responses"].get("200", {}).get("content", {}).keys() == {"text/event-stream"}
    flags = ("-N " if streams else "") + ("" if method == "GET" else f"-X {method} ")
    lines = [f'curl {flags}"$BASE{path}"']
    if with_token and "security" in operation:
        lines.append(TOKEN_HEADER)
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        lines += [f"-H 'content-type: {media}'", f"-d {shlex.quote(_json(content.get('example', {})))}"]
    return command(*lines)


def command(*lines: str) -> str:
    """Join parts of a shell command over several lines."""
    return " \\\n  ".join(lines)


def _example(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.format(_json(value), indent=2)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# Schemas -------------------------------------------------------------------------------------------------


def _schema(name: str, schema: Schema) -> Html:
    return fold(code(name), *_fields(schema), anchor=schema_id(name))


def _fields(schema: Schema) -> Iterator[Html]:
    if "description" in schema:
        yield element("p", prose(schema["description"]))
    properties: Mapping[str, Schema] = schema.get("properties", {})
    if not properties:
        yield element("p", _kind(schema))
        return
    required = schema.get("required", ())
    rows = [(code(name), _kind(each), _remarks(each, needed=name in required)) for name, each in properties.items()]
    yield table(("field", "type", ""), rows)


def _kind(schema: Schema | bool) -> Html:
    """Describe a type. Schemas of the app's types may be any JSON Schema, including true and false."""
    if not isinstance(schema, Mapping):
        return join("any")
    if "$ref" in schema:
        ref: str = schema["$ref"]
        return link(ref.rpartition("/")[2], f"#{schema_id(ref)}")
    for several in ("oneOf", "anyOf", "allOf"):
        if several in schema:
            return _either([_kind(each) for each in schema[several]])
    if "const" in schema:
        return code(_json(schema["const"]))
    if "enum" in schema:
        return _either([code(_json(value)) for value in schema["enum"]])
    match schema.get("type"):
        case "array":
            return join("array of ", _kind(schema.get("items", {})))
        case "object" if isinstance(schema.get("additionalProperties"), Mapping):
            return join("object of ", _kind(schema["additionalProperties"]))
        case str(name):
            return join(f"{name} ({schema['format']})" if "format" in schema else name)
        case _:
            return join("any")


def _either(kinds: list[Html]) -> Html:
    return join([kind if number == 0 else join(" or ", kind) for number, kind in enumerate(kinds)])


def _remarks(each: Schema | bool, *, needed: bool) -> Html:
    if not isinstance(each, Mapping):
        return join()
    schema: Schema = each.get("schema", each)
    remarks = [element("strong", "required")] if needed else []
    if text := each.get("description", schema.get("description")):
        remarks.append(prose(text.rstrip(".")))
    remarks += [
        join(before, code(str(schema[key])), after)
        for key, text in _LIMITS.items()
        if key in schema
        for before, _, after in [text.partition("{}")]
    ]
    if "default" in schema:
        remarks.append(join("default ", code(_json(schema["default"]))))
    return join([remark if number == 0 else join("; ", remark) for number, remark in enumerate(remarks)])
