"""What an edit changes in a payload. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec


class _Absent(msgspec.Struct, frozen=True):
    """Stands where there is no value, since null is one."""


ABSENT: Final = _Absent()


class Change(msgspec.Struct, frozen=True):
    """One place that differs: its JSON pointer, and both values; `ABSENT` where there was or is none."""

    path: str
    before: Any
    after: Any

    @property
    def document(self) -> dict[str, Any]:
        """Plain JSON: without `before` for what is new, without `after` for what is gone."""
        sides = {"before": self.before, "after": self.after}
        return {"path": self.path} | {side: value for side, value in sides.items() if value is not ABSENT}


def difference(before: Any, after: Any, path: str = "") -> list[Change]:
    """All places that differ, in the order of the first document; nothing if they are equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [*before, *(name for name in after if name not in before)]
        pairs = [(str(name), before.get(name, ABSENT), after.get(name, ABSENT)) for name in names]
    elif isinstance(before, list) and isinstance(after, list):
        longest = range(max(len(before), len(after)))
        pairs = [(str(place), _item(before, place), _item(after, place)) for place in longest]
    else:
        # 1 and true are equal to Python, and not to JSON.
        same = type(before) is type(after) and before == after
        return [] if same else [Change(path, before, after)]
    return [change for name, old, new in pairs for change in difference(old, new, f"{path}/{_escaped(name)}")]


def _item(values: list[Any], place: int) -> Any:
    return values[place] if place < len(values) else ABSENT


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
