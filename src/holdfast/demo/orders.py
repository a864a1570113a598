"""The demo's app: tasks of a small shop.

`holdfast demo` uses it. Run your own worker with `holdfast dev holdfast.demo.orders:app`, and submit with
`holdfast submit` or from code. `HOLDFAST_URL` names the engine. Default: `./holdfast.db`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from holdfast import Context, Fatal, Holdfast, RequireApproval, Retry

app = Holdfast()

#: Fast retries, to keep the demo short; use longer backoff for a real gateway.
FAST_RETRY = Retry(max_retries=3, base=0.2, cap=1, jitter=0.1)


#: Refunds of more than 100.00 need an approval.
app.guard.rule(
    "large refunds", task="refund", when=lambda args: args["cents"] > 10_000, then=RequireApproval("more than 100.00")
)


@dataclass(frozen=True)
class Order:
    """An order. Prices are in cents."""

    number: int
    customer: str
    prices: list[int]


@dataclass(frozen=True)
class Confirmation:
    """The message to the customer."""

    order: int
    total: int
    text: str


class GatewayBusy(Exception):
    """The card gateway did not answer in time; a retry may succeed."""


@app.task
async def confirm(order: Order) -> Confirmation:
    """Add up an order and write the confirmation."""
    total = sum(order.prices)
    return Confirmation(order.number, total, f"Dear {order.customer}, that is {total / 100:.2f}.")


@app.task(retry=FAST_RETRY)
def charge(ctx: Context, order: int, cents: int, hiccups: int = 0) -> str:
    """Charge a card. Runs in a thread, as a plain function. The gateway fails the first `hiccups` times."""
    time.sleep(0.01)
    if ctx.retry_count < hiccups:
        raise GatewayBusy(f"order {order}: no answer from the gateway")
    # The run key: a gateway that deduplicates by it charges a retried run only once.
    return f"charged {cents} for order {order} under {ctx.run_key}"


@app.task(retry=FAST_RETRY)
async def ship(order: int, country: str) -> str:
    """Pass an order to the carrier. An invalid country is fatal: a retry would not help."""
    if len(country) != 2:
        raise Fatal(f"order {order}: {country!r} is not a country code")
    return f"order {order} is on its way to {country}"


@app.task
async def refund(order: int, cents: int) -> str:
    """Refund an order. Large amounts need an approval."""
    return f"{cents / 100:.2f} refunded for order {order}"


@app.task
async def remind(order: int) -> str:
    """Ask the customer for a review; submitted with a delay."""
    return f"asked about order {order}"


@app.task(queue="reports")
async def report(month: str, pages: int) -> str:
    """Write a long report, one page every 0.1 s."""
    for _ in range(pages):
        await asyncio.sleep(0.1)
    return f"{month}: {pages} pages"
