"""Dependencies of packages, from their metadata, and their pinned versions in requirements/."""

from __future__ import annotations

import re
import zipfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REQUIREMENTS: Final = Path(__file__).resolve().parent.parent / "requirements"

#: A package, and one of its extras or an empty string.
_Part = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Pin:
    """One requirement of a file in requirements/, with its hashes."""

    requirement: Requirement
    hashes: list[str] = field(default_factory=list)

    @property
    def version(self) -> str:
        (only,) = self.requirement.specifier
        return only.version


def read_pins(name: str) -> dict[str, Pin]:
    """The pins of requirements/NAME.txt by package."""
    pins: dict[str, Pin] = {}
    text = (REQUIREMENTS / f"{name}.txt").read_text()
    for line in (line.removesuffix("\\").strip() for line in text.splitlines()):
        if line.startswith("--hash="):
            list(pins.values())[-1].hashes.append(line.removeprefix("--hash="))
        elif line and not line.startswith("#"):
            pin = Pin(Requirement(line))
            pins[canonicalize_name(pin.requirement.name)] = pin
    return pins


def read_here(name: str) -> dict[str, Pin]:
    """The pins that apply to this Python and platform."""
    pins = read_pins(name).items()
    return {one: pin for one, pin in pins if pin.requirement.marker is None or pin.requirement.marker.evaluate()}


def wheel_metadata(wheel: Path) -> Message:
    """The METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return Parser().parsestr(archive.read(name).decode())


def installed_metadata(name: str) -> Message:
    """The METADATA of an installed package."""
    facts = metadata.metadata(name)
    # Declared as a protocol without `get`.
    assert isinstance(facts, Message)
    return facts


def closure(root: Message, extras: list[str]) -> dict[str, set[str]]:
    """Each package that the root needs with these extras, directly or not → the packages that it needs itself.

    All but the root must be installed. Requirements of other platforms or Pythons are left out.
    """
    own = canonicalize_name(root["Name"])
    graph: dict[str, set[str]] = {own: set()}
    waiting: deque[_Part] = deque((own, extra) for extra in ("", *extras))
    seen: set[_Part] = set()
    while waiting:
        part = name, extra = waiting.popleft()
        if part not in seen:
            seen.add(part)
            needs = list(_needs(root if name == own else installed_metadata(name), extra))
            graph.setdefault(name, set()).update(need for need, _ in needs if need != name)
            waiting.extend(needs)
    return graph


def _needs(facts: Message, extra: str) -> Iterator[_Part]:
    for text in facts.get_all("Requires-Dist", []):
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(need.name), part) for part in ("", *sorted(need.extras)))
