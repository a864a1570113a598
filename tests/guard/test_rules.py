"""Guards in isolation: what they get, how decisions combine, and that a failing guard allows nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta
from typing import Any

import pytest

from holdfast import Allow, Deny, GuardRequest, RequireApproval
from holdfast.errors import GuardFailed, InvalidOption, Unavailable
from holdfast.guard.decisions import ApprovalTerms, Decision, Denial, combine, payload_hash, request_hash
from holdfast.guard.registry import GuardRegistry


def request(**changes: Any) -> GuardRequest:
    fields: dict[str, Any] = {
        "task": "pay",
        "tenant_id": "acme",
        "queue": "default",
        "arguments": {"amount": 5},
        "payload": b'{"amount":5}',
        "context": {},
        "source": "submit",
        "submitted_by": "",
        "idempotency_key": "",
    }
    return GuardRequest(**{**fields, **changes})


@pytest.fixture
def guards() -> GuardRegistry:
    return GuardRegistry(lambda: 5.0)


# How decisions combine ------------------------------------------------------------------------------


def test_no_decision_is_allowed() -> None:
    assert combine([]) is None
    assert combine([("a", Allow()), ("b", Allow())]) is None


def test_deny_beats_approval_beats_allow() -> None:
    allow: tuple[str, Decision] = ("allow", Allow())
    approve: tuple[str, Decision] = ("approve", RequireApproval("hm"))
    deny: tuple[str, Decision] = ("deny", Deny("never"))
    for order in ([allow, approve, deny], [deny, approve, allow], [approve, deny, allow]):
        assert combine(order) == Denial(("never",), ("deny",))
    assert combine([approve, allow]) == combine([allow, approve]) == ApprovalTerms(("hm",), ("approve",), 1, 0)


def test_all_reasons_and_policies_are_kept_in_order() -> None:
    assert combine([("a", Deny("one")), ("b", Deny("two"))]) == Denial(("one", "two"), ("a", "b"))


def test_the_largest_quorum_and_the_shortest_deadline_apply() -> None:
    decisions: list[tuple[str, Decision]] = [
        ("a", RequireApproval("x", quorum=2)),
        ("b", RequireApproval("y", deadline=timedelta(hours=1))),
        ("c", RequireApproval("z", quorum=3, deadline=90)),
    ]
    assert combine(decisions) == ApprovalTerms(("x", "y", "z"), ("a", "b", "c"), 3, 90_000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RequireApproval("x", quorum=0), "quorum"),
        (lambda: RequireApproval("x", quorum=101), "quorum"),
        (lambda: RequireApproval("x", quorum=True), "quorum"),
        (lambda: RequireApproval("x", quorum=1.0), "quorum"),  # type: ignore[arg-type]
        (lambda: RequireApproval("x", deadline=0), "deadline"),
        (lambda: RequireApproval("x", deadline=-1), "deadline"),
        (lambda: RequireApproval("x", deadline="soon"), "deadline"),  # type: ignore[arg-type]
        (lambda: RequireApproval(None), "reason"),  # type: ignore[arg-type]
        (lambda: Deny("x" * 2_001), "reason"),
        (lambda: Deny(1), "reason"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_decision_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        make()


# Registering ----------------------------------------------------------------------------------------


async def test_every_guard_is_called(guards: GuardRegistry) -> None:
    calls: list[tuple[str, GuardRequest]] = []

    @guards
    def plain(request: GuardRequest) -> Decision | None:
        calls.append(("plain", request))
        return Deny("no")

    @guards(name="a policy with a name")
    async def other(request: GuardRequest) -> Decision | None:
        calls.append(("other", request))
        return None

    guarded = request()
    assert await guards.judge(guarded) == Denial(("no",), ("plain",))
    assert calls == [("plain", guarded), ("other", guarded)]


async def test_a_callable_object_can_be_a_guard(guards: GuardRegistry) -> None:
    class Policy:
        async def __call__(self, request: GuardRequest) -> Decision | None:
            return Deny(request.task)

    guards(name="policy")(Policy())
    assert await guards.judge(request()) == Denial(("pay",), ("policy",))


def test_names_are_required_and_unique(guards: GuardRegistry) -> None:
    guards.rule("large", then=Deny("no"))
    with pytest.raises(InvalidOption, match="already"):
        guards.rule("large", then=Deny("no"))
    for name in ("", "x" * 201, None):
        with pytest.raises(InvalidOption, match="name"):
            guards.rule(name, then=Deny("no"))  # type: ignore[arg-type]
    with pytest.raises(InvalidOption, match="function"):
        guards(7)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("task", "tenant", "matches"),
    [
        ("*", "*", True),
        ("pay*", "*", True),
        ("pay", "acme", True),
        ("PAY", "*", False),
        ("refund", "*", False),
        ("*", "acme-*", False),
        ("p?y", "ac*", True),
    ],
)
async def test_rules_match_task_and_tenant(guards: GuardRegistry, task: str, tenant: str, matches: bool) -> None:
    guards.rule("rule", task=task, tenant=tenant, then=Deny("no"))
    assert (await guards.judge(request()) is not None) is matches


async def test_rules_match_arguments(guards: GuardRegistry) -> None:
    guards.rule("large", task="pay", when=lambda args: args["amount"] > 1000, then=RequireApproval("much", quorum=2))
    assert await guards.judge(request()) is None
    assert await guards.judge(request(arguments={"amount": 1001})) == ApprovalTerms(("much",), ("large",), 2, 0)


def test_invalid_rules_are_refused(guards: GuardRegistry) -> None:
    async def later(args: dict[str, Any]) -> bool:
        return bool(args)

    with pytest.raises(InvalidOption, match="plain function"):
        guards.rule("rule", when=later, then=Deny("no"))
    with pytest.raises(InvalidOption, match="then"):
        guards.rule("rule", then="no")  # type: ignore[arg-type]
    assert not guards.registered


# A failing guard allows nothing ----------------------------------------------------------------------


async def test_a_guard_that_raises_allows_nothing(guards: GuardRegistry) -> None:
    @guards
    def broken(request: GuardRequest) -> Decision | None:
        raise KeyError("limit")

    with pytest.raises(GuardFailed, match=r"'broken'.*KeyError: 'limit'") as caught:
        await guards.judge(request())
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_rule_about_a_missing_argument_allows_nothing(guards: GuardRegistry) -> None:
    guards.rule("large", when=lambda args: args["amount"] > 1000, then=Deny("no"))
    with pytest.raises(GuardFailed, match="amount"):
        await guards.judge(request(arguments={}))


async def test_a_holdfast_error_from_a_guard_passes_unchanged(guards: GuardRegistry) -> None:
    @guards
    async def remote(request: GuardRequest) -> Decision | None:
        raise Unavailable("the policy server is unreachable")

    with pytest.raises(Unavailable, match="policy server"):
        await guards.judge(request())


@pytest.mark.parametrize("decision", [True, False, "allow", Deny, ()])
async def test_an_unknown_return_value_allows_nothing(guards: GuardRegistry, decision: Any) -> None:
    guards(name="odd")(lambda request: decision)
    with pytest.raises(GuardFailed, match="not an Allow, RequireApproval, Deny or None"):
        await guards.judge(request())


async def test_a_guard_that_times_out_allows_nothing() -> None:
    guards = GuardRegistry(lambda: 0.05)

    @guards
    async def slow(request: GuardRequest) -> Decision | None:
        await asyncio.Event().wait()
        return None

    with pytest.raises(GuardFailed, match=r"within 0\.05 s"):
        await guards.judge(request())


async def test_a_synchronous_guard_that_hangs_does_not_block_the_loop() -> None:
    guards, gate = GuardRegistry(lambda: 0.05), threading.Event()

    @guards
    def stuck(request: GuardRequest) -> Decision | None:
        gate.wait(20)
        return Allow()

    began = time.monotonic()
    try:
        with pytest.raises(GuardFailed, match="no decision"):
            await guards.judge(request())
        assert time.monotonic() - began < 10
    finally:
        gate.set()


async def test_a_timeout_raised_by_a_guard_is_not_a_guard_timeout(guards: GuardRegistry) -> None:
    @guards
    async def times_out(request: GuardRequest) -> Decision | None:
        raise TimeoutError("my own")

    with pytest.raises(GuardFailed, match="TimeoutError: my own"):
        await guards.judge(request())


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt()])
async def test_every_exception_in_a_guards_thread_is_a_failure(guards: GuardRegistry, error: BaseException) -> None:
    def odd(request: GuardRequest) -> Decision | None:
        raise error

    guards(odd)
    with pytest.raises(GuardFailed, match=type(error).__name__):
        await guards.judge(request())


# What an approval covers ------------------------------------------------------------------------------


def test_the_hash_covers_task_tenant_payload_and_request() -> None:
    first = payload_hash("pay", "acme", b"{}")
    assert first == payload_hash("pay", "acme", b"{}")
    others = [
        payload_hash("pa", "yacme", b"{}"),
        payload_hash("pay", "acme", b"{ }"),
        payload_hash("pay", "acm", b"e{}"),
        payload_hash("pay2", "acme", b"{}"),
        request_hash("pay", "acme", b"{}", "", None),
        request_hash("pay", "acme", b"{}", "send", None),
        request_hash("pay", "acme", b"{}", "send", {"to": "ann"}),
    ]
    assert len({first, *others}) == 8


def test_the_order_of_details_does_not_change_the_hash() -> None:
    one = request_hash("pay", "acme", b"{}", "send", {"a": 1, "b": [1.5, None]})
    assert one == request_hash("pay", "acme", b"{}", "send", {"b": [1.5, None], "a": 1})
