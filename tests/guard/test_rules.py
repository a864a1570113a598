"""Guards by themselves: what they are asked, how their answers add up, and that a broken one lets nothing pass."""

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
    given: dict[str, Any] = {
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
    return GuardRequest(**{**given, **changes})


@pytest.fixture
def guards() -> GuardRegistry:
    return GuardRegistry(lambda: 5.0)


# How answers add up ---------------------------------------------------------------------------------


def test_nothing_said_is_allowed() -> None:
    assert combine([]) is None
    assert combine([("a", Allow()), ("b", Allow())]) is None


def test_no_beats_ask_beats_yes() -> None:
    yes: tuple[str, Decision] = ("yes", Allow())
    ask: tuple[str, Decision] = ("ask", RequireApproval("hm"))
    no: tuple[str, Decision] = ("no", Deny("never"))
    for order in ([yes, ask, no], [no, ask, yes], [ask, no, yes]):
        assert combine(order) == Denial(("never",), ("no",))
    assert combine([ask, yes]) == combine([yes, ask]) == ApprovalTerms(("hm",), ("ask",), 1, 0)


def test_all_reasons_and_policies_are_kept_in_order() -> None:
    assert combine([("a", Deny("one")), ("b", Deny("two"))]) == Denial(("one", "two"), ("a", "b"))


def test_the_largest_quorum_and_the_shortest_deadline_count() -> None:
    decisions: list[tuple[str, Decision]] = [
        ("a", RequireApproval("x", quorum=2)),
        ("b", RequireApproval("y", deadline=timedelta(hours=1))),
        ("c", RequireApproval("z", quorum=3, deadline=90)),
    ]
    assert combine(decisions) == ApprovalTerms(("x", "y", "z"), ("a", "b", "c"), 3, 90_000)


@pytest.mark.parametrize(
    ("wrong", "message"),
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
def test_a_decision_that_cannot_be_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        wrong()


# Registering ----------------------------------------------------------------------------------------


async def test_every_guard_is_asked(guards: GuardRegistry) -> None:
    seen: list[tuple[str, GuardRequest]] = []

    @guards
    def plain(request: GuardRequest) -> Decision | None:
        seen.append(("plain", request))
        return Deny("no")

    @guards(name="a policy with a name")
    async def other(request: GuardRequest) -> Decision | None:
        seen.append(("other", request))
        return None

    asked = request()
    assert await guards.judge(asked) == Denial(("no",), ("plain",))
    assert seen == [("plain", asked), ("other", asked)]


async def test_a_callable_object_can_be_a_guard(guards: GuardRegistry) -> None:
    class Policy:
        async def __call__(self, request: GuardRequest) -> Decision | None:
            return Deny(request.task)

    guards(name="policy")(Policy())
    assert await guards.judge(request()) == Denial(("pay",), ("policy",))


def test_names_are_needed_and_used_once(guards: GuardRegistry) -> None:
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
async def test_rules_by_task_and_tenant(guards: GuardRegistry, task: str, tenant: str, matches: bool) -> None:
    guards.rule("rule", task=task, tenant=tenant, then=Deny("no"))
    assert (await guards.judge(request()) is not None) is matches


async def test_rules_by_argument(guards: GuardRegistry) -> None:
    guards.rule("large", task="pay", when=lambda args: args["amount"] > 1000, then=RequireApproval("much", quorum=2))
    assert await guards.judge(request()) is None
    assert await guards.judge(request(arguments={"amount": 1001})) == ApprovalTerms(("much",), ("large",), 2, 0)


def test_rules_that_cannot_be_are_refused(guards: GuardRegistry) -> None:
    async def later(args: dict[str, Any]) -> bool:
        return bool(args)

    with pytest.raises(InvalidOption, match="plain function"):
        guards.rule("rule", when=later, then=Deny("no"))
    with pytest.raises(InvalidOption, match="then"):
        guards.rule("rule", then="no")  # type: ignore[arg-type]
    assert not guards


# A broken guard lets nothing pass --------------------------------------------------------------------


async def test_a_guard_that_raises_lets_nothing_pass(guards: GuardRegistry) -> None:
    @guards
    def broken(request: GuardRequest) -> Decision | None:
        raise KeyError("limit")

    with pytest.raises(GuardFailed, match=r"'broken'.*KeyError: 'limit'") as caught:
        await guards.judge(request())
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_rule_about_an_argument_that_is_not_there_lets_nothing_pass(guards: GuardRegistry) -> None:
    guards.rule("large", when=lambda args: args["amount"] > 1000, then=Deny("no"))
    with pytest.raises(GuardFailed, match="amount"):
        await guards.judge(request(arguments={}))


async def test_a_guard_may_say_itself_what_is_wrong(guards: GuardRegistry) -> None:
    @guards
    async def asks_elsewhere(request: GuardRequest) -> Decision | None:
        raise Unavailable("the policy server is away")

    with pytest.raises(Unavailable, match="policy server"):
        await guards.judge(request())


@pytest.mark.parametrize("answer", [True, False, "allow", Deny, ()])
async def test_nonsense_lets_nothing_pass(guards: GuardRegistry, answer: Any) -> None:
    guards(name="odd")(lambda request: answer)
    with pytest.raises(GuardFailed, match="not an Allow, RequireApproval, Deny or None"):
        await guards.judge(request())


async def test_a_guard_that_never_answers_lets_nothing_pass() -> None:
    guards = GuardRegistry(lambda: 0.05)

    @guards
    async def slow(request: GuardRequest) -> Decision | None:
        await asyncio.Event().wait()
        return None

    with pytest.raises(GuardFailed, match=r"within 0\.05 s"):
        await guards.judge(request())


async def test_a_plain_guard_that_hangs_does_not_hold_the_loop() -> None:
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


async def test_a_timeout_of_the_guards_own_is_told_as_what_it_is(guards: GuardRegistry) -> None:
    @guards
    async def impatient(request: GuardRequest) -> Decision | None:
        raise TimeoutError("my own")

    with pytest.raises(GuardFailed, match="TimeoutError: my own"):
        await guards.judge(request())


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt()])
async def test_whatever_a_thread_raises_is_a_failure(guards: GuardRegistry, error: BaseException) -> None:
    def odd(request: GuardRequest) -> Decision | None:
        raise error

    guards(odd)
    with pytest.raises(GuardFailed, match=type(error).__name__):
        await guards.judge(request())


# What an approval is bound to -------------------------------------------------------------------------


def test_the_hash_is_of_exactly_this_job() -> None:
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


def test_the_order_of_details_does_not_matter() -> None:
    one = request_hash("pay", "acme", b"{}", "send", {"a": 1, "b": [1.5, None]})
    assert one == request_hash("pay", "acme", b"{}", "send", {"b": [1.5, None], "a": 1})
