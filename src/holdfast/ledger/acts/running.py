"""What a store says of acts: how one is run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeVar

from holdfast.ledger.acts.steps import Act

T = TypeVar("T")


class Acts(ABC):
    """The roles of a ledger that are written as acts are made of this and of a store's way to run them."""

    @abstractmethod
    async def _run(self, act: Act[T]) -> T:
        """In one transaction; what it returns, once that is committed. An error that it returns is raised then."""

    async def _look(self, act: Act[T]) -> T:
        """The same for one that only reads: a store that has one writer need not keep others from writing for it."""
        return await self._run(act)
