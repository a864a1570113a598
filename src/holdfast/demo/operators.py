"""Two people in the demo: one approves a large refund, and it takes both to throw a dead letter away."""

from __future__ import annotations

import json
from typing import Any, Final

from rich.console import Console

from holdfast import Job
from holdfast.demo import orders
from holdfast.demo.sandbox import read_holdfast, run_holdfast

console: Final = Console()


class Person:
    """Somebody with a token, at a terminal."""

    def __init__(self, name: str, token: str) -> None:
        self.name = name
        self._token = token

    @classmethod
    async def hire(cls, name: str) -> Person:
        """Made by whoever holds the store."""
        return cls(name, await read_holdfast("token", "create", name, "--role", "admin", "--all-tenants"))

    async def types(self, *words: str, fails: bool = False) -> None:
        """Show the command and what it says; the demo ends if it does not succeed, or fail, as it should."""
        console.print(f"\n[bold]{self.name} $[/bold] holdfast {_shown(words)}", highlight=False, soft_wrap=True)
        code = await run_holdfast(*words, HOLDFAST_TOKEN=self._token)
        if (code != 0) is not fails:
            raise SystemExit(f"holdfast {words[0]} ended with {code}")


async def approve_a_refund(ada: Person) -> Job[str]:
    """A large refund waits for a person; the worker is free meanwhile."""
    job = await orders.refund.submit(7, cents=25_000)
    console.print(f"\na refund of 250.00 is [bold]{(await job.view()).state}[/bold]: a rule of the app asks people")
    await ada.types("approvals", "list")
    (waiting,) = json.loads(await read_holdfast("approvals", "list", "--json"))
    await ada.types("approvals", "approve", waiting["approval_id"], "--reason", "the customer is right")
    return job


async def discard_a_letter(ada: Person, ben: Person) -> None:
    """One asks, another confirms; the same person is refused."""
    letters: list[dict[str, Any]] = json.loads(await read_holdfast("dlq", "list", "--task", "ship", "--json"))
    dlq_id = letters[0]["dlq_id"]
    await ada.types("dlq", "discard", dlq_id, "--reason", "there is no Atlantis")
    await ada.types("dlq", "confirm", dlq_id, fails=True)
    await ben.types("dlq", "confirm", dlq_id)
    await ben.types("log", "--limit", "4")


def _shown(words: tuple[str, ...]) -> str:
    return " ".join(f"'{word}'" if " " in word else word for word in words)
