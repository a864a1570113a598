"""A small shop: what happens after a customer has ordered.

`holdfast demo` plays it. Run a worker of your own with `holdfast dev holdfast.demo.orders:app`, and submit with
`holdfast submit` or from code. The engine comes from `HOLDFAST_URL`, else it is `./holdfast.db`.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from holdfast import Context, Fatal, Holdfast, RequireApproval, Retry

app = Holdfast()

#: Fast retries, so that the demo is short; a real gateway deserves more patience.
PATIENT = Retry(max_retries=3, base=0.2, cap=1, jitter=0.1)


#: Nobody gives away more than 100.00 without a second look.
app.guard.rule(
    "large refunds", task="refund", when=lambda args: args["cents"] > 10_000, then=RequireApproval("more than 100.00")
)


@dataclass(frozen=True)
class Order:
    """What a customer wants. Prices are in cents."""

    number: int
    customer: str
    prices: list[int]


@dataclass(frozen=True)
class Confirmation:
    """What the customer gets to read."""

    order: int
    total: int
    text: str


class GatewayBusy(Exception):
    """The card gateway did not answer in time; it will, later."""


@app.task
async def confirm(order: Order) -> Confirmation:
    """Add up an order and write to the customer."""
    total = sum(order.prices)
    return Confirmation(order.number, total, f"Dear {order.customer}, that is {total / 100:.2f}.")


@app.task(retry=PATIENT)
def charge(ctx: Context, order: int, cents: int, hiccups: int = 0) -> str:
    """Charge a card. A plain function: it runs in a thread. The gateway fails the first `hiccups` times."""
    time.sleep(0.01)
    if ctx.retry_count < hiccups:
        raise GatewayBusy(f"order {order}: no answer from the gateway")
    # The run's own key: a gateway that knows it charges a retried run only once.
    return f"charged {cents} for order {order} under {ctx.run_key}"


@app.task(retry=PATIENT)
async def ship(order: int, country: str) -> str:
    """Hand an order to the carrier. No retry makes an unknown country known."""
    if len(country) != 2:
        raise Fatal(f"order {order}: {country!r} is no country code")
    return f"order {order} is on its way to {country}"


@app.task
async def refund(order: int, cents: int) -> str:
    """Give money back. Large amounts wait for a person's yes."""
    return f"{cents / 100:.2f} given back for order {order}"


@app.task
async def remind(order: int) -> str:
    """Ask the customer for a review; submitted with a delay."""
    return f"asked about order {order}"


@app.task(queue="reports")
async def report(month: str, pages: int) -> str:
    """A long report, a page every tenth of a second."""
    for _ in range(pages):
        await asyncio.sleep(0.1)
    return f"{month}: {pages} pages"
