"""HTTP errors do not contain secrets, and webhook deliveries are counted."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Fatal, Holdfast
from holdfast.errors import Denied, EngineUnavailable, HoldfastError, InvalidOption, UsageError
from holdfast.http.problems import BadRequest, problem_of
from holdfast.webhooks.deliveries import WebhookDelivery, sign_payload
from holdfast.worker.webhook_worker import _WebhookBackend
from tests.observe.support import scrape

_secret = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=14, max_size=30).map(lambda s: f"Zq{s}")
_forms = st.sampled_from(["redis://u:{}@h/0 refused", "password={}", "Authorization: Bearer {}", "hf_ab12_{}"])


@given(secret=_secret, form=_forms, kind=st.sampled_from([UsageError, InvalidOption, EngineUnavailable, BadRequest]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_no_secret_in_an_http_error(secret: str, form: str, kind: type[HoldfastError]) -> None:
    problem, headers = problem_of(kind(f"it is {form.format(secret)}"), "/api/v1/jobs")
    assert secret not in repr(headers)
    assert secret.encode() not in msgspec.json.encode(problem)


def test_no_secret_in_a_guard_s_reasons() -> None:
    problem, _ = problem_of(Denied("pay", ("token=hunter2-Zx9q is not allowed",), ("rule",)), "/x")
    assert b"hunter2" not in msgspec.json.encode(problem)


class FakeSender:
    """Fails twice, then delivers."""

    def __init__(self) -> None:
        self.calls = 0

    async def send(self, url: str, webhook_id: str, body: bytes, trace: Mapping[str, str]) -> int:
        self.calls += 1
        if self.calls < 3:
            raise Fatal("no")
        return 204


async def test_webhooks_are_counted() -> None:
    async with Holdfast("sqlite://") as app:
        webhook_app = _WebhookBackend(app.engine, app.settings, FakeSender())  # type: ignore[arg-type]
        delivery = WebhookDelivery(
            url="https://x", webhook_id="w", type="job.succeeded", body="{}", tenant_id="a", trace_id=""
        )
        arguments = msgspec.json.decode(sign_payload(app.settings, delivery))
        for _ in range(2):
            with pytest.raises(Fatal):
                await webhook_app._deliver(**arguments)
        await webhook_app._deliver(**arguments)
        metrics = await scrape(app)
    assert (metrics['webhooks_total{result="failed"}'], metrics['webhooks_total{result="delivered"}']) == (2, 1)
