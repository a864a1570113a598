"""Tasks that fail in child processes. They are at the top level, because a child imports this module again."""

from __future__ import annotations

from holdfast import Holdfast, Retry

app = Holdfast("sqlite://")


class CannotBePickled(Exception):
    """An exception whose type and value cannot be pickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.handle = (number for number in range(3))


def raise_in_nested_call() -> None:
    raise CannotBePickled("password=hunter2-Zx9q", "two")


@app.task(process=True, retry=Retry(max_retries=0))
def fail_in_process() -> None:
    raise_in_nested_call()
