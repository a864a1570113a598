"""Names of Redis keys: namespace and queue can be read from every key, so no two deployments share one."""

from __future__ import annotations

import re
from itertools import combinations
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from holdfast.core.job import DEFAULT_QUEUE
from holdfast.core.key_names import owner_of
from holdfast.engine.redis.engine import RedisEngine
from holdfast.engine.redis.keys import KeyNames, QueueKeys
from holdfast.errors import InvalidOption
from holdfast.settings import Settings

#: Words from which hostile names are built: those of holdfast's own keys, and some that are not.
WORDS: Final = (
    "stream", "queue", "job", "idempotency", "announced", "queues", "tasks", "task", "high", "direct", "lane", "1",
    "7", "default", "shop", "emails", "retry", "control", "waiters", "", "ä", "a.b-c_d",
)  # fmt: skip
NAMESPACE: Final = re.compile(r"[A-Za-z0-9_.-]+")

paths = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(":".join)
namespaces = st.just("") | st.sampled_from(["shop", *filter(NAMESPACE.fullmatch, WORDS)])
queues = (paths | st.text(min_size=1, max_size=8)).filter(
    lambda name: bool(name) and name.isprintable() and not set(name) & set(" {}")
)
names = (
    paths.filter(bool)
    | st.sampled_from(["{shop}:stream:task", "{shop:emails}:job:x"])
    | st.text(min_size=1, max_size=8)
)
tails = paths | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


#: The time of an example says nothing on a busy machine.
exhaustively = settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def deployments(draw: st.DrawFn) -> tuple[KeyNames, str]:
    given_names = {
        setting: draw(names)
        for setting in ("stream_task", "stream_result", "stream_dlq", "queue_retry", "queue_suspended")
        if draw(st.booleans())
    }
    try:
        found = KeyNames(namespace=draw(namespaces), cluster=draw(st.booleans()), **given_names)
    except InvalidOption:
        assume(False)
        raise
    return found, draw(st.just(DEFAULT_QUEUE) | queues)


def keys_of(names: KeyNames, queue: str, tail: str, other_tail: str) -> list[bytes]:
    """One key of every kind."""
    keys = QueueKeys(queue, names)
    return [
        *(stream for lane in (0, 1, 77) for stream in keys.lane(lane)),
        *(keys.result, keys.dlq, keys.retry, keys.suspended, keys.feed, keys.wake, keys.notices, keys.delayed),
        *(keys.pending_retries, keys.waiting_approval, keys.dlq_pending, keys.control, keys.lanes, keys.workers),
        *(keys.waiters, keys.job(tail), keys.idempotency(other_tail or "t", tail)),
    ]


@exhaustively
@given(deployments(), tails, tails)
def test_every_key_names_its_namespace_and_queue(deployment: tuple[KeyNames, str], tail: str, other_tail: str) -> None:
    """That `owner_of` can read both from nothing but the key makes the encoding injective."""
    names, queue = deployment
    for key in keys_of(names, queue, tail, other_tail):
        assert owner_of(key.decode()) == (names.namespace, queue), key
    for common in (names.queues, names.tasks):
        # On Cluster no record begins with `job:`, so that its only two plain keys cannot be taken for one.
        is_job = names.cluster and names.namespace == "job"
        assert owner_of(common) == ("" if is_job else names.namespace, DEFAULT_QUEUE), common


@exhaustively
@given(deployments(), tails, tails)
def test_the_keys_of_a_deployment_differ(deployment: tuple[KeyNames, str], tail: str, other_tail: str) -> None:
    names, queue = deployment
    found = [*keys_of(names, queue, tail, other_tail), names.queues.encode(), names.tasks.encode()]
    assert len(set(found)) == len(found)


@exhaustively
@given(deployments(), st.lists(st.tuples(tails, tails), min_size=2, max_size=4, unique=True))
def test_different_jobs_and_idempotency_keys_have_different_keys(
    deployment: tuple[KeyNames, str], pairs: list[tuple[str, str]]
) -> None:
    keys = QueueKeys(deployment[1], deployment[0])
    for one, other in combinations(pairs, 2):
        assert keys.idempotency(*one) != keys.idempotency(*other)
        assert (keys.job(one[0]) == keys.job(other[0])) == (one[0] == other[0])
        assert keys.job(one[0]) != keys.idempotency(*other)


@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize(
    ("namespace", "queue", "prefix"),
    [
        ("", "default", "{default}:"),
        ("shop", "default", "{shop:default}:"),
        ("", "emails", "{emails}:"),
        ("shop", "emails", "{shop:emails}:"),
        ("shop", "emails:eu", "{shop:emails:eu}:"),
    ],
)
def test_names_that_were_unambiguous_have_not_moved(namespace: str, queue: str, prefix: str, cluster: bool) -> None:
    if not cluster and queue == "default":
        prefix = f"{namespace}:" if namespace else ""
    names = KeyNames(namespace=namespace, cluster=cluster)
    keys = QueueKeys(queue, names)
    assert (keys.control, keys.streams[1]) == (f"{prefix}queue:control".encode(), f"{prefix}stream:task".encode())
    assert names.former(queue) == []


@pytest.mark.parametrize("name", ["tasks", "ingest:tasks", "queue:tasks", "ingest:tasks:dlq", "stream:mine"])
def test_configured_names_without_a_namespace_are_taken_literally(name: str) -> None:
    keys = QueueKeys("default", KeyNames(stream_task=name))
    assert keys.streams[:3] == tuple(f"{name}{priority}".encode() for priority in (":high", "", ":low"))


def test_a_configured_name_that_another_namespace_could_have_gets_a_hash_tag() -> None:
    assert QueueKeys("default", KeyNames(stream_task="shop:stream:task")).streams[1] == b"{default}:shop:stream:task"
    assert QueueKeys("default", KeyNames("shop", stream_task="tasks")).streams[1] == b"{shop:default}:tasks"
    assert QueueKeys("default", KeyNames("shop", stream_task="queue:tasks")).streams[1] == b"shop:queue:tasks"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"stream_result": "stream:task:high"}, "HOLDFAST_STREAM_RESULT"),
        ({"queue_retry": "queue:suspended"}, "HOLDFAST_QUEUE_SUSPENDED"),
        ({"stream_dlq": "queue:control"}, "HOLDFAST_STREAM_DLQ"),
        ({"stream_task": "job"}, "HOLDFAST_STREAM_TASK"),
        ({"stream_result": "job:7"}, "HOLDFAST_STREAM_RESULT"),
        ({"stream_dlq": "", "stream_result": "stream:dlq"}, "HOLDFAST_STREAM_"),
        ({"namespace": "job"}, "HOLDFAST_NAMESPACE"),
        ({"namespace": "a:b"}, "HOLDFAST_NAMESPACE"),
    ],
)
def test_names_that_cannot_be_distinguished_are_refused(names: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        KeyNames(**names)


def test_a_namespace_that_is_only_ambiguous_on_one_server_works_on_a_cluster() -> None:
    RedisEngine.from_settings(Settings(url="redis+cluster://a:1", namespace="job"))
    with pytest.raises(InvalidOption, match="HOLDFAST_NAMESPACE"):
        RedisEngine.from_settings(Settings(url="redis://a:1", namespace="job"))


@pytest.mark.parametrize("queue", ["emails}:job:z", "{shop", "a{b}c"])
def test_a_queue_name_with_braces_has_no_keys(queue: str) -> None:
    with pytest.raises(InvalidOption, match="braces"):
        QueueKeys(queue, KeyNames())
