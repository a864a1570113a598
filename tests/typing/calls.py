"""Valid and invalid calls of tasks. Not run: a test type-checks this file and compares the errors with the comments.

A line that ends in `# error: CODE` must be refused with that code; every other line must be accepted.
"""

from __future__ import annotations

from typing import assert_type

from holdfast import Approval, Context, Deny, GuardRequest, Holdfast, Job, RequireApproval, Retry, Task

app = Holdfast("sqlite://")


@app.task
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.task(retry=Retry(max_retries=1), timeout=5)
async def publish(ctx: Context, title: str, *, draft: bool = False) -> str:
    return f"{ctx.job_id} {title} {draft}"


@app.task
def shout(text: str) -> list[str]:
    return [text]


@app.task(process=True)
def crunch(ctx: Context, size: int) -> float:
    return size / 2


assert_type(add, Task[[int, int], int])  # error: assert-type


async def valid_calls() -> None:
    assert_type(await add.submit(1), Job[int])
    assert_type(await add.submit(1, b=2), Job[int])
    assert_type(await (await add.submit(1, 2)).result(timeout=5), int)
    assert_type(await publish.submit("title"), Job[str])
    assert_type(await publish.submit("title", draft=True), Job[str])
    assert_type(await shout.submit("hey"), Job[list[str]])
    assert_type(await crunch.submit(7), Job[float])
    assert_type(crunch.submit_sync(7).result_sync(), float)
    assert_type(await add.options(delay=5, priority="high").submit(1), Job[int])
    assert_type(await add.submit_many([(1,), (2, 3)]), list[Job[int]])
    assert_type(await add.submit_many([add.options(idempotency_key="k").bind(1), (2, 3)]), list[Job[int]])
    assert_type(await add.submit_many(add.options(delay=n).bind(n, b=n) for n in range(3)), list[Job[int]])
    assert_type(await app.job("id").info(), object)  # error: assert-type


async def measure(size: int) -> float:
    return size / 2


async def book(connection: object, item: str) -> list[int]:
    return [len(item)]


async def valid_effects(ctx: Context) -> None:
    assert_type(await ctx.effect("key", measure, 1), float)
    assert_type(await ctx.effect("key", measure, size=1), float)
    assert_type(await ctx.effect("key", len, "text"), int)
    assert_type(await ctx.effect.options(in_doubt="run_again", not_done=OSError, ttl=60)("key", measure, 1), float)
    assert_type(await ctx.step("name", measure, 1), float)
    assert_type(await ctx.step("name", len, "text"), int)
    assert_type(await ctx.transaction(object(), "key", book, "item"), list[int])
    assert_type(ctx.blocking.effect("key", len, "text"), int)
    assert_type(ctx.blocking.step("name", len, "text"), int)
    await ctx.sleep(5)


async def invalid_effects(ctx: Context) -> None:
    await ctx.effect("key", measure, "1")  # error: call-overload
    await ctx.effect("key", measure)  # error: call-overload
    await ctx.effect(1, measure, 1)  # error: call-overload
    await ctx.step("name", measure, "1")  # error: call-overload
    ctx.effect.options(in_doubt="guess")  # error: arg-type
    await ctx.transaction(object(), "key", book, 1)  # error: arg-type
    ctx.blocking.effect("key", len, 1)  # error: arg-type


@app.guard
async def require_approval(request: GuardRequest) -> RequireApproval | None:
    return RequireApproval("why", quorum=2, deadline=60) if request.arguments else None


@app.guard(name="plain")
def deny(request: GuardRequest) -> Deny | None:
    return Deny("why") if request.tenant_id else None


assert_type(deny(GuardRequest), Deny | None)  # error: arg-type


@app.guard  # error: type-var
def not_a_guard(request: int) -> str:
    return str(request)


async def valid_approvals(ctx: Context) -> None:
    assert_type(await ctx.approval("name"), Approval)
    assert_type(await ctx.approval("name", {"any": 1}, reason="why", quorum=2, deadline=60), Approval)
    assert_type(ctx.blocking.approval("name", [1]), Approval)
    app.guard.rule("name", task="pay*", tenant="acme", when=lambda args: args["n"] > 1, then=RequireApproval("why"))


async def invalid_approvals(ctx: Context) -> None:
    await ctx.approval(1)  # error: arg-type
    await ctx.approval("name", deadline="soon")  # error: arg-type
    ctx.blocking.approval("name", quorum="2")  # error: arg-type
    app.guard.rule("name", then="no")  # error: arg-type
    app.guard.rule("name")  # error: call-arg
    RequireApproval()  # error: call-arg


async def invalid_calls() -> None:
    await add.submit("1")  # error: arg-type
    await add.submit()  # error: call-arg
    await add.submit(1, 2, 3)  # error: call-arg
    await add.submit(1, c=2)  # error: call-arg
    await publish.submit(1)  # error: arg-type
    await publish.submit("title", True)  # error: call-arg
    await shout.submit(b"hey")  # error: arg-type
    await crunch.submit("7")  # error: arg-type
    crunch.submit_sync(size="7")  # error: arg-type
    await add.options(delay=5).submit("1")  # error: arg-type
    await add.options(delay="soon").submit(1)  # error: arg-type
    await add.options(urgency=5).submit(1)  # error: call-arg
    await add.submit_many([1, 2])  # error: list-item
    await add.submit_many([add.bind("1")])  # error: arg-type
    await add.submit_many([shout.bind("hey")])  # error: list-item
    text: str = await (await add.submit(1)).result()  # error: assignment
    print(text)
    app.task(timeout="5")  # error: call-overload
    app.task(on_exhausted="drop")  # error: call-overload
