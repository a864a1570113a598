"""Examples for the OpenAPI document: made of the schemas, so that none is missing and each of them fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

JOB_ID: Final = "01a1e0a3d0e37dd689ca5255038423f0"
_INSTANT: Final = "2026-11-15T12:00:00Z"

#: What fields of these names hold, wherever they are.
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
    "person": "bob",
    "requested_by": "ada",
    "target": "job",
    "location": f"/api/v1/jobs/{JOB_ID}",
    "payload": {"a": 1, "b": 2},
    "result": 3,
    "code": "TASK_ERROR",
    "error_code": "TASK_ERROR",
    "fingerprint": "6f1ed002ab559585",
    "payload_hash": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "message": "the mail server does not answer",
    "detail": "what is wrong, and what to do",
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
#: A field of these names is an error's text where it is one.
_ERROR: Final = "ValueError: the mail server does not answer"
_KEYS: Final = {"states": "queued", "tenants": "acme"}


def example_of(schema: Mapping[str, Any], components: Mapping[str, Any], name: str = "") -> Any:
    """A value that fits the schema."""
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
