"""Mask secrets before text leaves the process: logs, failures, HTTP errors, output (M3, T7).

Failures include the events and dead letters made from them. Masked are: passwords in URLs and connection strings,
values of names like `password`, `token` or `api_key` in every common notation, credentials in headers, tokens that are
known by their form, private keys, and what the setting `redact` adds; `observe.secret_forms` has the tables. A secret
that nothing in the text identifies cannot be found: do not put one into an exception.

Time is linear in the length of the text; `redact_and_truncate` cuts long ones first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from holdfast.observe.secret_forms import (
    NAMES,
    OWN_TOKEN,
    PHRASES,
    PRIVATE_KEY,
    REST_OF_KEY,
    STEMS,
    TOKEN_STEMS,
    URL_REST,
    URL_USER,
    WEB_KEY,
    named_values,
    secret_name,
)

MASK: Final = "***"
_NAMED_MASK: Final = rf"\g<name>{MASK}"

#: Texts are truncated to this multiple of the limit before they are searched.
_SLACK: Final = 4
#: Maximum depth of nested values; deeper ones are masked.
_DEPTH: Final = 20

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class _Rules:
    """Redaction rules of this process. Rules are only added, never removed."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._names = list(NAMES)
        self.stems = list(STEMS)
        self.patterns: list[re.Pattern[str]] = []
        self._compile()

    def add(self, rules: Iterable[str]) -> None:
        fresh = [rule for rule in rules if rule not in self._given]
        for rule in fresh:
            self._given.add(rule)
            if _PLAIN_NAME.fullmatch(rule):
                self._names.append(re.escape(rule))
                self.stems.append(rule.lower())
            else:
                self.patterns.append(compile_rule(rule))
        if fresh:
            self._compile()

    def _compile(self) -> None:
        self.named = named_values(self._names)
        self.name = secret_name(self._names)


def compile_rule(rule: str) -> re.Pattern[str]:
    """Compile a rule of the setting `redact` that is not a plain name. Raises `ValueError`."""
    try:
        return re.compile(rule)
    except re.error as exc:
        raise ValueError(f"{rule!r} is neither a name nor a valid regular expression: {exc}") from exc


_rules: Final = _Rules()


def add_redaction_rules(rules: Iterable[str]) -> None:
    """Add rules in this process: names of secret values, or regular expressions."""
    _rules.add(rules)


def redact(text: str) -> str:
    """Mask the secrets in a text.

    >>> redact("redis://app:s3cret@cache:6379/0 with password=s3cret")
    'redis://app:***@cache:6379/0 with password=***'
    """
    if "PRIVATE KEY" in text:
        text = REST_OF_KEY.sub(MASK, PRIVATE_KEY.sub(MASK, text))
    if "://" in text:
        text = URL_REST.sub(_mask_url, text)
        text = WEB_KEY.sub(_NAMED_MASK, text)
    lower = text.lower()
    for stem, pattern in PHRASES:
        if stem in lower:
            text = pattern.sub(_NAMED_MASK, text)
    if any(stem in lower for stem in _rules.stems):
        for pattern in _rules.named:
            text = pattern.sub(_NAMED_MASK, text)
    if "hf_" in text:
        text = OWN_TOKEN.sub(_NAMED_MASK, text)
    for stem, pattern in TOKEN_STEMS:
        if stem in text:
            text = pattern.sub(MASK, text)
    for pattern in _rules.patterns:
        text = pattern.sub(MASK, text)
    return text


def _mask_url(found: re.Match[str]) -> str:
    """Mask from the first user name up to the last "@" of the word: a password may contain "@", ":" or "/"."""
    word = found[0]
    end = word.rfind("@")
    start = 0
    while 0 <= start < end:
        if (user := URL_USER.match(word, start)) is not None and user.end() < end:
            return f"{word[: user.end()]}{MASK}{word[end:]}"
        start = word.find("://", start + 1)
    return word


def redact_and_truncate(text: str, limit: int, *, end: bool = False) -> str:
    """Return the start of a text, or its `end`, with secrets masked.

    A long text is cut before it is searched. The word at the cut is dropped, because half a secret may not be
    recognised; a text without blanks keeps it.
    """
    if len(text) > _SLACK * limit:
        whole = text
        if end:
            _, blank, text = text[-_SLACK * limit :].partition(" ")
        else:
            text, blank, _ = text[: _SLACK * limit].rpartition(" ")
        if not blank:
            text = whole[-_SLACK * limit :] if end else whole[: _SLACK * limit]
    text = redact(text)
    return text[-limit:] if end else text[:limit]


def redact_value(value: Any, depth: int = _DEPTH) -> Any:
    """Mask the secrets of a JSON-like value: in its texts, and under names of secrets."""
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth == 0:
        return MASK
    if isinstance(value, Mapping):
        return {
            redact(str(key)): MASK if _is_secret(str(key), inner) else redact_value(inner, depth - 1)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [redact_value(inner, depth - 1) for inner in value]
    return redact(str(value))


def _is_secret(name: str, value: Any) -> bool:
    return value is not None and value != "" and _rules.name.search(name) is not None


__all__ = ["redact"]
