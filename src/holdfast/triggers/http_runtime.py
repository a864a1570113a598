"""Runtime that sends messages to an agent runtime over HTTP (`AGENT_RUNTIME_URL`).

    POST <url>      Idempotency-Key: …    traceparent: …
    {"event_name": …, "context": {"message": …, "headers": …, …}, "focus": …, "tenant_id": …}

2xx is success; its JSON body has the run id as `run_id` or `id`. 408, 429, 5xx and a missing answer are retried; any
other status is final. The key is the same in every attempt, so that a runtime can detect duplicates.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from holdfast.core.codec import encode_json
from holdfast.errors import Fatal, InvalidOption
from holdfast.extras import require
from holdfast.observe.redact import redact
from holdfast.triggers.envelope import ParseError, parse_json, short_hash
from holdfast.triggers.runtime import Runtime, RuntimeCall, RuntimeResult, run_id_of

if TYPE_CHECKING:
    import httpx


_TIMEOUT_S: Final = 30.0
#: Large enough for any message with its headers.
_BODY_LIMIT: Final = 64 * 1024 * 1024
#: Limit of a header value. Longer or non-ASCII keys are sent as their hash.
_VALUE_LIMIT: Final = 255
_RETRIED: Final = (408, 429)


class _Redacting(logging.Filter):
    """Redacts the log of httpx, which contains each URL with its query string."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        return True


_redacting: Final = _Redacting()


class RuntimeFailed(Exception):
    """The runtime did not accept the call; a retry may succeed."""


class HttpRuntime(Runtime):
    """Client of one runtime with pooled connections. Use it in one event loop."""

    submits_jobs = False

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = _TIMEOUT_S,
        token: str = "",
        connections: int = 100,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`token` is sent as a bearer token. `transport` is for tests."""
        require("an HTTP runtime", "httpx")
        import httpx

        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidOption("url of a runtime must start with http:// or https://")
        logging.getLogger("httpx").addFilter(_redacting)
        self._httpx = httpx
        self._url = url
        self._where = redact(url)
        self._client = httpx.AsyncClient(
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            headers={"authorization": f"Bearer {token}"} if token else None,
            transport=transport,
            # Send messages only to the configured URL: no proxies from the environment, no redirects.
            trust_env=False,
            follow_redirects=False,
        )

    async def trigger_event(
        self, event_name: str, context: Mapping[str, Any], focus: str | None, tenant_id: str
    ) -> str:
        key = str(context.get("message_id", ""))
        call = RuntimeCall(
            event_name=event_name, context=context, focus=focus, tenant_id=tenant_id, trace_id=f"queue-{key}", key=key
        )
        return (await self.run_call(call)).run_id

    async def run_call(self, call: RuntimeCall) -> RuntimeResult:
        body = encode_json(
            {
                "event_name": call.event_name,
                "context": {**call.context, "message": call.message()},
                "focus": call.focus,
                "tenant_id": call.tenant_id,
            },
            "the request",
            _BODY_LIMIT,
        )
        try:
            response = await self._client.post(self._url, content=body, headers=_headers(call))
        except self._httpx.HTTPError as exc:
            raise RuntimeFailed(f"{self._where} did not answer: {type(exc).__name__}") from exc
        if response.is_success:
            return RuntimeResult(_run_id(response.content))
        text = f"{self._where} answered {response.status_code}"
        if response.status_code < 500 and response.status_code not in _RETRIED:
            raise Fatal(text)
        raise RuntimeFailed(text)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    def __repr__(self) -> str:
        return f"<HttpRuntime {self._where}>"


def _headers(call: RuntimeCall) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if call.key:
        headers["idempotency-key"] = call.key if _fits(call.key) else short_hash(call.key)
    if call.traceparent:
        headers["traceparent"] = call.traceparent
    if _fits(call.trace_id):
        headers["x-trace-id"] = call.trace_id
    return headers


def _fits(value: str) -> bool:
    return len(value) <= _VALUE_LIMIT and value.isascii() and value.isprintable()


def _run_id(body: bytes) -> str:
    try:
        return run_id_of(parse_json(body).payload)
    except ParseError:
        return ""
