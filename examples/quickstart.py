"""The README's example: one task, one job and its worker in one process."""

import asyncio

from holdfast import Holdfast, Retry, Worker

app = Holdfast("sqlite:///shop.db")  # or "redis://localhost:6379/0", or nothing: HOLDFAST_URL decides


@app.task(retry=Retry(max_retries=3), timeout=60)
async def charge(order: str, cents: int) -> str:
    return f"{order}: {cents / 100:.2f} charged"


async def main() -> None:
    async with app:
        job = await charge.options(idempotency_key="order-7").submit("order-7", cents=1999)  # typed like the function
        worker = Worker(app)  # usually a separate process: holdfast worker shop.py:app
        running = asyncio.create_task(worker.run())
        print(await job.result(timeout=10))
        worker.drain()
        await running


if __name__ == "__main__":
    asyncio.run(main())
