"""User files that the tests write into their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Final

APP: Final = """
from holdfast import Holdfast

app = Holdfast()


@app.task
async def add(a: int, b: int) -> int:
    return a + b
"""
#: Broker types that need an extra of the same name → their minimal connection.
TRIGGERS: Final = {
    "kafka": "{bootstrap_servers: '127.0.0.1:9'}",
    "rabbitmq": "{}",
    "redis": "{}",
    "sqs": "{}",
}


def write_app(folder: Path, text: str = APP) -> None:
    """`shop.py`."""
    (folder / "shop.py").write_text(text)


def write_trigger(folder: Path, broker: str, runtime: str = "{task: add}") -> None:
    """`shop.py`, and `triggers.yaml` with a trigger on that broker."""
    write_app(folder)
    lines = [
        "queue_name: orders",
        "consumer_group: shop",
        f"adapter: {{type: {broker}, connection: {TRIGGERS.get(broker, '{}')}}}",
        f"runtime: {runtime}",
    ]
    (folder / "triggers.yaml").write_text("\n".join(lines) + "\n")
