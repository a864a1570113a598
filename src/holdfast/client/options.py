"""Options of a submission, checked before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypedDict

from holdfast.clock import to_ms
from holdfast.core.codec import to_plain_json
from holdfast.core.job import DEFAULT_QUEUE, DEFAULT_TENANT, EMPTY_META, Envelope, KeyReuse, Meta, Priority
from holdfast.core.retry import Duration, Retry, duration_ms
from holdfast.core.text import KEY_LIMIT as KEY_LIMIT
from holdfast.core.text import NAME_LIMIT as NAME_LIMIT
from holdfast.core.text import check_length as check_length
from holdfast.core.text import check_name as check_name
from holdfast.core.text import check_text as check_text
from holdfast.core.webhook_url import ANY_SUBSCRIBER
from holdfast.errors import InvalidOption

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LATEST_MS: Final = to_ms(datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC) - _EPOCH)


class SubmitOptions(TypedDict, total=False):
    """Options as a caller gives them; None is the same as absent."""

    idempotency_key: str | None
    idempotency_window: Duration | None
    delay: Duration | None
    run_at: datetime | None
    priority: Priority | str | None
    queue: str | None
    tenant_id: str | None
    retry: Retry | None
    trace_id: str | None
    context: Mapping[str, Any] | None
    hold: bool
    durable: bool
    webhook: str | None
    on_key_reuse: KeyReuse | str | None
    connection: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options of one submission."""

    queue: str = DEFAULT_QUEUE
    tenant_id: str = DEFAULT_TENANT
    idempotency_key: str = ""
    trace_id: str = ""
    delay_ms: int = 0
    run_at_ms: int = 0
    hold: bool = False
    durable: bool = False
    on_key_reuse: KeyReuse = KeyReuse.REFUSE
    meta: Meta = EMPTY_META
    #: The user's connection: the job is part of its transaction.
    connection: Any = None

    def envelope(self, job_id: str, task: str, payload: bytes, schema: str = "") -> Envelope:
        """The envelope of one job. `schema`: fingerprint of the schema that the payload was checked with."""
        return Envelope(
            job_id=job_id,
            task=task,
            payload=payload,
            queue=self.queue,
            tenant_id=self.tenant_id,
            idempotency_key=self.idempotency_key,
            trace_id=self.trace_id,
            meta=self.meta,
            delay_ms=self.delay_ms,
            run_at_ms=self.run_at_ms,
            hold=self.hold,
            durable=self.durable,
            schema=schema,
            on_key_reuse=self.on_key_reuse,
        )


def make_options(given: SubmitOptions, *, queue: str, priority: Priority, payload_limit: int) -> Options:
    """The caller's options, with the task's own as defaults. Raises `InvalidOption`."""
    if unknown := given.keys() - SubmitOptions.__annotations__.keys():
        raise InvalidOption(f"unknown option {min(unknown)!r}")
    delay, run_at, retry = given.get("delay"), given.get("run_at"), given.get("retry")
    if delay is not None and run_at is not None:
        raise InvalidOption("give delay or run_at, not both")
    if retry is not None and not isinstance(retry, Retry):
        raise InvalidOption(f"retry must be a Retry(…), not {retry!r}")
    connection = given.get("connection")
    if connection is not None and given.get("durable"):
        raise InvalidOption("give durable or connection, not both; with a connection, your own commit makes it durable")
    chosen = given.get("priority")
    meta = Meta(
        priority=priority if chosen is None else parse_priority(chosen),
        retry=retry,
        context=_context(given.get("context"), payload_limit),
        webhook=_webhook(given.get("webhook")),
        key_window_ms=_window_ms(given.get("idempotency_window"), given.get("idempotency_key")),
    )
    return Options(
        queue=check_name(_or(given.get("queue"), queue), "queue"),
        tenant_id=check_name(_or(given.get("tenant_id"), DEFAULT_TENANT), "tenant_id"),
        idempotency_key=check_text(given.get("idempotency_key"), "idempotency_key"),
        trace_id=check_text(given.get("trace_id"), "trace_id"),
        delay_ms=0 if delay is None else duration_ms(delay, "delay"),
        run_at_ms=0 if run_at is None else _instant_ms(run_at),
        hold=given.get("hold", False),
        durable=bool(given.get("durable", False)),
        on_key_reuse=parse_key_reuse(given.get("on_key_reuse")),
        meta=EMPTY_META if meta == EMPTY_META else meta,
        connection=connection,
    )


def _window_ms(window: Duration | None, key: str | None) -> int:
    """How long the key is known; 0 for the engine's default."""
    if window is None:
        return 0
    if key is None:
        raise InvalidOption("idempotency_window needs an idempotency_key; give both")
    window_ms = duration_ms(window, "idempotency_window")
    if window_ms < 1:
        raise InvalidOption("idempotency_window must be more than 0")
    return window_ms


def parse_key_reuse(value: object) -> KeyReuse:
    """Parse "refuse", "return" or None, which means the default."""
    if value is None:
        return KeyReuse.REFUSE
    try:
        return KeyReuse(value)  # type: ignore[arg-type]
    except ValueError as exc:
        raise InvalidOption(f"on_key_reuse must be one of {', '.join(KeyReuse)}, not {value!r}") from exc


def parse_priority(value: object) -> Priority:
    """Parse `Priority.HIGH`, "high" or 0."""
    if isinstance(value, str):
        found = Priority.__members__.get(value.upper())
    elif isinstance(value, int) and not isinstance(value, bool) and value in tuple(Priority):
        found = Priority(value)
    else:
        found = None
    if found is None:
        raise InvalidOption(f"priority must be one of {', '.join(p.name.lower() for p in Priority)}, not {value!r}")
    return found


def _or(given: str | None, default: str) -> str:
    return default if given is None else given


def _webhook(url: object) -> str:
    if url is None:
        return ""
    if not isinstance(url, str) or not url or url == ANY_SUBSCRIBER:
        raise InvalidOption("webhook must be an address like https://example.org/hook")
    # Which addresses are allowed depends on the settings: the submitter checks it.
    return url


def _instant_ms(run_at: object) -> int:
    if not isinstance(run_at, datetime):
        raise InvalidOption(f"run_at must be a datetime, not {run_at!r}")
    if run_at.tzinfo is None or run_at.utcoffset() is None:
        raise InvalidOption(f"run_at must be aware: {run_at!r} has no time zone; add tzinfo=UTC (or your own)")
    # Zero would mean "now"; an instant before 1970 is in the past like any other.
    run_at_ms = max(1, to_ms(run_at - _EPOCH))
    if run_at_ms > _LATEST_MS:
        raise InvalidOption(f"run_at={run_at.isoformat()} is after the year 9999 in UTC")
    return run_at_ms


def _context(context: object, limit: int) -> dict[str, Any] | None:
    if context is None:
        return None
    if not isinstance(context, Mapping) or not all(isinstance(key, str) for key in context):
        raise InvalidOption(f"context must be a mapping with string keys, not {context!r}")
    # Plain JSON values, as the task will get them.
    plain: dict[str, Any] = to_plain_json(dict(context), "the context", limit)
    return plain or None
