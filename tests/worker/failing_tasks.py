"""Tasks that fail in child processes: a child imports this module again, so they are at its top level."""

from __future__ import annotations

from holdfast import Holdfast, Retry

app = Holdfast("sqlite://")


class CannotBePickled(Exception):
    """Neither its type nor its value can be sent to another process as they are."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.handle = (number for number in range(3))


def raise_deep() -> None:
    raise CannotBePickled("password=hunter2-Zx9q", "two")


@app.task(process=True, retry=Retry(max_retries=0))
def in_a_process() -> None:
    raise_deep()
