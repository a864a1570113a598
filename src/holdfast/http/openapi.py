"""The OpenAPI document, built from the operations and structs that serve the requests.

Examples are generated from the schemas, so that every operation has one and each is valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from holdfast._version import __version__
from holdfast.app import Holdfast
from holdfast.errors import Forbidden, HoldfastError, Unauthorized
from holdfast.http.operation import Operation, ResponseSpec
from holdfast.http.problems import (
    CONTENT_TYPE,
    DOWN,
    TITLES,
    AddressTooLong,
    BadRequest,
    BodyTooLarge,
    HeadersTooLarge,
    Problem,
    RequestTooSlow,
    TooManyConnections,
    Unprocessable,
    UnsupportedMediaType,
    status_of,
)
from holdfast.http.task_schemas import REFS, TaskSchemas, references
from holdfast.http.wire import ID_PATTERN

JOB_ID: Final = "01a1e0a3d0e37dd689ca5255038423f0"
_INSTANT: Final = "2026-11-15T12:00:00Z"

#: Example values by field name.
_VALUES: Final[dict[str, Any]] = {
    "job_id": JOB_ID,
    "dlq_id": "01a1e0a40d6670af9e31fb67a82d564d",
    "approval_id": "01a1e0a40d697d18b90fb01195876736",
    "target_id": JOB_ID,
    "id": JOB_ID,
    "task": "add",
    "queue": "default",
    "tenant_id": "acme",
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
    "idempotency_key": "sum-1",
    "priority": "normal",
    "state": "succeeded",
    "type": "task.succeeded",
    "from_state": "running",
    "to_state": "succeeded",
    "worker": "host-1:4711",
    "submitted_by": "ada",
    "actor": "ada",
    "voter": "bob",
    "requested_by": "ada",
    "target": "job",
    "location": f"/api/v1/jobs/{JOB_ID}",
    "payload": {"a": 1, "b": 2},
    "result": 3,
    "code": "TASK_ERROR",
    "error_code": "TASK_ERROR",
    "fingerprint": "6f1ed002ab559585",
    "payload_hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "message": "mail server did not respond",
    "detail": "what is wrong; what to do",
    "reason": "the customer called",
    "name": "publish",
    "queue_name": "orders",
    "adapter": "kafka",
    "message_id": "orders/0/17",
    "event_name": "order.placed",
    "agent_run_id": JOB_ID,
    "process": "host-1-4711",
    "key": "the-key-of-the-link",
    "history": [],
    "attempt": 1,
    "weight": 1,
    "quorum": 1,
    "ready": True,
    "done": True,
    "approve": True,
    "engine": "ok",
    "ledger": "ok",
    "changes": [{"path": "/to", "before": "ada@example", "after": "ada@example.org"}],
}
#: Example value of text fields named `error`.
_ERROR: Final = "ValueError: mail server did not respond"
_KEYS: Final = {"states": "queued", "tenants": "acme"}


def example_of(schema: Mapping[str, Any], components: Mapping[str, Any], name: str = "") -> Any:
    """Return a value that is valid for the schema."""
    if "$ref" in schema:
        return example_of(components[schema["$ref"].rpartition("/")[2]], components, name)
    if "anyOf" in schema:
        kinds = [kind for kind in schema["anyOf"] if kind != {"type": "null"}]
        return None if name not in _VALUES else example_of(kinds[0], components, name)
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        return {field: example_of(inner, components, field) for field, inner in schema["properties"].items()}
    if name in _VALUES and _fits(_VALUES[name], schema):
        return _VALUES[name]
    if "examples" in schema:
        return schema["examples"][0]
    if "enum" in schema:
        return schema["enum"][0]
    match kind:
        case "string":
            return _text(schema, name)
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return False
        case "array":
            return [example_of(schema["items"], components, name)] if "items" in schema else []
        case "object":
            inner = schema.get("additionalProperties")
            return {_KEYS.get(name, "name"): example_of(inner, components)} if isinstance(inner, dict) else {}
        case _:
            return None


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return bool(value in schema["enum"])
    kinds = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return bool(schema.get("type", kinds[type(value)]) == kinds[type(value)])


def _text(schema: Mapping[str, Any], name: str) -> str:
    if schema.get("format") == "date-time":
        return _INSTANT
    return _ERROR if name == "error" else ""


#: Extension of an error response: the possible values of its `code`.
CODES: Final = "x-problem-codes"
_PARAMETER: Final = re.compile(r"\{(\w+)\}")
_WAIT: Final = frozenset({429, 503})
#: Components for submissions → name pattern of the component for one task.
_SUBMISSIONS: Final = {"SubmitRequest": "Submit{}Request", "BulkSubmitItem": "BulkSubmit{}Item"}
#: Fields whose schema is a component; otherwise code generators create a class for every struct with the field.
_NAMED: Final = {"priority": "Priority", "context": "JobContext"}
_DESCRIPTION: Final = (
    "Submit and follow jobs and operate their queues. Errors are `application/problem+json` with a stable `code`. "
    "Authenticate with `Authorization: Bearer hf_…`. Resources of other tenants are reported as not found."
)


def document(operations: Sequence[Operation], app: Holdfast | None = None) -> dict[str, Any]:
    """Build the document. With an app it includes the app's tasks and their arguments."""
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schemas)
    components = dict(schemas.components)
    tasks = TaskSchemas(app, components) if app is not None and app.tasks else None
    for name, pattern in _SUBMISSIONS.items():
        components[name] = components[name] | {"not": {"required": ["delay_s", "run_at"]}}
        if tasks is not None:
            components[name] = tasks.submission(name, components[name], pattern)
    if tasks is not None:
        components |= tasks.components
        _replace_examples(paths, tasks.example())
    return {
        "openapi": "3.1.0",
        "info": {"title": "holdfast", "version": __version__, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": _drop_unused(components, paths),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "hf_<id>_<secret>"}},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in operations)],
    }


def _replace_examples(paths: Mapping[str, Any], example: dict[str, Any] | None) -> None:
    """Use one of the app's tasks in the examples of submissions, or remove the examples."""
    bulk = None if example is None else {"jobs": [example | {"idempotency_key": "order-17"}]}
    for path, body in (("/api/v1/jobs", example), ("/api/v1/jobs/bulk", bulk)):
        content = paths[path]["post"]["requestBody"]["content"]["application/json"]
        content.pop("example")
        content |= {} if body is None else {"example": body}


def _drop_unused(components: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """Drop components without references: structs of query strings, whose fields are parameters."""
    used: set[str] = set()
    waiting = list(references(paths))
    while waiting:
        if (name := waiting.pop().rpartition("/")[2]) not in used and name in components:
            used.add(name)
            waiting += references(components[name])
    return {name: schema for name, schema in components.items() if name in used}


class _Schemas:
    """All structs as JSON Schema."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        kinds: dict[Any, None] = {Problem: None}
        for operation in operations:
            returned = (response.kind for response in operation.responses.values())
            kinds |= dict.fromkeys(kind for kind in (operation.query, operation.body, *returned) if kind is not None)
        self._kinds = list(kinds)
        found, self.components = msgspec.json.schema_components(self._kinds, ref_template=REFS)
        self._by_kind = {id(kind): schema for kind, schema in zip(self._kinds, found, strict=True)}
        for schema in list(self.components.values()):
            for field, name in _NAMED.items():
                self._name_field(schema.get("properties", {}), field, name)

    def _name_field(self, properties: dict[str, Any], field: str, name: str) -> None:
        inner = properties.get(field, {})
        if "enum" in inner or inner.get("type") == "object":
            assert self.components.setdefault(name, inner | {"title": name})["title"] == name
            properties[field] = {"$ref": REFS.format(name=name)}

    def get(self, kind: Any) -> dict[str, Any]:
        return self._by_kind[id(kind)]

    def fields(self, kind: type[msgspec.Struct]) -> tuple[dict[str, Any], list[str]]:
        """Fields of a struct, and the names of the required ones."""
        schema = self.components[self.get(kind)["$ref"].rpartition("/")[2]]
        return schema["properties"], schema.get("required", [])


def _operation(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation, schemas), *_headers(operation)],
        "responses": _responses(operation, schemas),
    }
    if operation.description:
        described["description"] = operation.description
    if operation.body is not None:
        content: dict[str, Any] = {"schema": schemas.get(operation.body)}
        if operation.body_example is not None:
            content["example"] = operation.body_example
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    if operation.permission is not None:
        described["security"] = [{"token": []}]
    return described


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    schema = {"type": "string", "pattern": ID_PATTERN}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema, "example": example_of(schema, {}, name)}
        for name in _PARAMETER.findall(operation.path)
    ]


def _query_parameters(operation: Operation, schemas: _Schemas) -> list[dict[str, Any]]:
    if operation.query is None:
        return []
    properties, required = schemas.fields(operation.query)
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _not_null(schema)}
        | ({"description": schema["description"]} if "description" in schema else {})
        for name, schema in properties.items()
    ]


def _not_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Remove null from a parameter's schema: a query string has no null, an absent parameter is omitted."""
    plain = {name: value for name, value in schema.items() if not (name == "default" and value is None)}
    if "anyOf" in plain:
        kinds = [kind for kind in plain.pop("anyOf") if kind != {"type": "null"}]
        assert len(kinds) == 1
        only: dict[str, Any] = plain | kinds[0]
        return only
    return plain


def _headers(operation: Operation) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "header",
            "required": False,
            "description": description,
            "schema": {"type": "string", "pattern": pattern},
        }
        for name, (description, pattern) in operation.headers.items()
    ]


def _responses(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    responses = {str(status): _response(spec, schemas) for status, spec in operation.responses.items()}
    errors: list[type[HoldfastError]] = [*operation.errors, *_usual_errors(operation)]
    by_status: dict[int, list[str]] = {}
    for error in errors:
        codes = by_status.setdefault(status_of(error), [])
        if error.code not in codes:
            codes.append(error.code)
    for status, codes in sorted(by_status.items()):
        responses.setdefault(str(status), _problem(operation, status, codes, schemas))
    return responses


def _usual_errors(operation: Operation) -> list[type[HoldfastError]]:
    errors: list[type[HoldfastError]] = [Unprocessable]
    if operation.permission is not None:
        errors += [Unauthorized, Forbidden, *DOWN]
    if operation.body is not None:
        errors += [BadRequest, BodyTooLarge, UnsupportedMediaType]
    # Of `holdfast serve`; other servers have their limits.
    return [*errors, RequestTooSlow, AddressTooLong, HeadersTooLarge, TooManyConnections]


def _response(spec: ResponseSpec, schemas: _Schemas) -> dict[str, Any]:
    described: dict[str, Any] = {"description": spec.description}
    if spec.kind is not None or spec.content_type != "application/json":
        schema = {"type": "string"} if spec.kind is None else schemas.get(spec.kind)
        content: dict[str, Any] = {"schema": schema}
        if spec.example is not None:
            content["example"] = spec.example
        else:
            content["example"] = example_of(schema, schemas.components)
        described["content"] = {spec.content_type: content}
    if spec.headers:
        described["headers"] = {
            name: {"description": text, "required": True, "schema": {"type": "string"}}
            for name, text in spec.headers.items()
        }
    if spec.links:
        described["links"] = {
            name: {"operationId": target, "parameters": dict(parameters)}
            for name, (target, parameters) in spec.links.items()
        }
    return described


def _problem(operation: Operation, status: int, codes: Sequence[str], schemas: _Schemas) -> dict[str, Any]:
    examples = {
        code: {
            "value": {
                "type": f"urn:holdfast:problem:{code.lower().replace('_', '-')}",
                "title": TITLES[status],
                "status": status,
                "detail": "what is wrong; what to do",
                "code": code,
                "instance": operation.path,
            }
        }
        for code in codes
    }
    described: dict[str, Any] = {
        "description": f"{TITLES[status]}: {', '.join(codes)}",
        # One class for all errors in generated clients; the extension lists the codes.
        "content": {CONTENT_TYPE: {"schema": schemas.get(Problem), "examples": examples}},
        CODES: list(codes),
    }
    names = ["Retry-After"] if status in _WAIT else ["WWW-Authenticate"] if status == 401 else []
    if names:
        described["headers"] = {name: {"required": True, "schema": {"type": "string"}} for name in names}
    return described
