"""`submit_raw` accepts JSON as bytes, and refuses anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.errors import InvalidPayload, UsageError
from holdfast.testing import inline


@pytest.mark.parametrize("payload", [{"a": 1}, '{"a": 1}', ["a"], None, bytearray(b"{}")])
@pytest.mark.parametrize("tasks", [True, False])
async def test_a_payload_that_is_not_bytes_is_refused_with_a_remedy(payload: Any, tasks: bool) -> None:
    app = Holdfast("sqlite://")
    if tasks:
        app.task(name="add")(_add)
    with pytest.raises(InvalidPayload, match=rf"not a {type(payload).__name__}; use json\.dumps") as caught:
        await app.submit_raw("add", payload)
    assert isinstance(caught.value, UsageError)


def _add(a: int) -> int:
    return a + 1


async def test_bytes_are_accepted() -> None:
    app = Holdfast("sqlite://")
    app.task(name="add")(_add)
    with inline(app):
        job = await app.submit_raw("add", json.dumps({"a": 1}).encode())
        assert await job.result() == 2
