"""Words of the sentences in `ledger.explain`: instants, spans, errors, people. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from holdfast.clock import to_datetime
from holdfast.core.job import Event
from holdfast.core.states import State
from holdfast.errors import EffectInDoubt

_ORDINALS: Final = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")


def error_of(event: Event) -> str:
    data = event.data or {}
    kind = data.get("type") or data.get("code") or ""
    message = " ".join(str(data.get("message") or event.message or "").split())
    # What to do stands at the end of the story; here half of a command would be left of it.
    message = message.partition(EffectInDoubt.ADVICE)[0]
    told = ": ".join(part for part in (str(kind), message) if part)
    return f": {told[:200]}" if told else ""


def by(event: Event) -> str:
    actor = (event.data or {}).get("actor")
    return f" by {actor}" if actor else ""


def reason_of(event: Event) -> str:
    data = event.data or {}
    # What an operator did has its reason there, or none; not every store writes a message as well.
    said = str(data.get("reason") or ("" if "actor" in data else event.message))
    said = said.partition(EffectInDoubt.ADVICE)[0]
    return f" ({' '.join(said.split())[:200]})" if said else ""


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def word(state: State | None) -> str:
    return words(state.value) if state is not None else "nothing"


def words(name: str) -> str:
    return name.replace("dlq_", "dead letter ").replace("_", " ")


def ordinal(number: int) -> str:
    return _ORDINALS[number] if number < len(_ORDINALS) else f"{number}th"


def clock(at_ms: int) -> str:
    return f"{to_datetime(at_ms):%Y-%m-%d %H:%M:%S} UTC"


def span(duration_ms: int) -> str:
    if abs(duration_ms) < 10_000:
        return f"{duration_ms / 1000:g} s" if abs(duration_ms) >= 1_000 else f"{duration_ms} ms"
    whole = timedelta(seconds=round(duration_ms / 1000))
    days, seconds = whole.days, whole.seconds
    parts = ((days, "d"), (seconds // 3600, "h"), (seconds // 60 % 60, "min"), (seconds % 60, "s"))
    told = [f"{count} {unit}" for count, unit in parts if count]
    return " ".join(told[:2])
