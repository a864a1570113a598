"""Mask secrets before text leaves the process: logs, failures, HTTP errors, output (M3, T7).

Failures include the events and dead letters made from them. Masked are: passwords in URLs, values of names like
`password`, `token` or `api_key` in every common notation, `Authorization` headers, bearer tokens, holdfast's own
tokens, AWS keys, JSON web tokens, private keys, and what the setting `redact` adds. A secret that nothing in the text
identifies cannot be found: do not put one into an exception.

Time is linear in the length of the text for all practical texts; `redact_and_truncate` cuts long ones first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

MASK: Final = "***"

#: A secret name ends here or continues after `_` or `-`: `secret_access_key` matches, `max_tokens` does not.
_NAMES: Final = (
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "secret",
    "token",
    "api[_-]?key",
    "access[_-]?key",
    "private[_-]?key",
    "credentials?",
    "cookie",
    "signature",
)
#: A text without any of these is not searched for `_NAMES`: a substring search is 100 times faster.
_STEMS: Final = (
    *("passw", "passphrase", "pwd", "secret", "token", "credential", "cookie", "signature"),
    *(f"{kind}{joint}key" for kind in ("api", "access", "private") for joint in ("", "_", "-")),
)
_AWS_STEMS: Final = ("AKIA", "ASIA", "AGPA", "AIDA", "AROA", "ANPA", "ANVA")
#: Texts are truncated to this multiple of the limit before they are searched.
_SLACK: Final = 4
#: Maximum depth of nested values; deeper ones are masked.
_DEPTH: Final = 20

_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")

_PRIVATE_KEY: Final = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL
)
#: End of a private key in a text that was truncated inside it.
_REST_OF_KEY: Final = re.compile(r"\A.*-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----", re.DOTALL)
# Greedy up to the last "@" of the word: a password may contain "@", ":" or "/".
_CREDENTIALS: Final = re.compile(r"(?P<user>://[^\s:@/]{0,200}):\S{1,4000}@")
#: In a web URL, a user name without a password is usually an API key.
_WEB_KEY: Final = re.compile(r"(?P<scheme>\bhttps?://)[^\s:@/?#]{1,4000}@", re.IGNORECASE)
#: To the end of the line: digest credentials have several parts.
_AUTHORIZATION: Final = re.compile(r"(?P<name>authorization\\?[\"']?\s{0,3}[:=,]\s{0,3})[^\r\n]+", re.IGNORECASE)
_BEARER: Final = re.compile(r"\b(?P<name>bearer|basic)\s{1,3}(?=[^\s]*[\d=._-])[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_OWN_TOKEN: Final = re.compile(r"\b(?P<name>hf_[0-9A-Za-z]{1,64}_)[0-9A-Za-z_-]{4,}")
_AWS_KEY: Final = re.compile(rf"\b(?:{'|'.join(_AWS_STEMS)})[0-9A-Z]{{16}}\b")
#: Does not start inside a word: each such start would be scanned to the end of the word.
_JWT: Final = re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?")


def _named_values(names: Iterable[str]) -> re.Pattern[str]:
    """Pattern for `name=value`, `name: value`, `'name': 'value'`, and the same inside an escaped text."""
    return re.compile(
        rf"(?P<name>(?:{'|'.join(names)})(?:[_-][\w-]{{0,40}})?\\?[\"']?\]?\s{{0,3}}(?:=>|[:=])\s{{0,3}})"
        # Quoted, including escapes; quoted inside a quoted text; otherwise up to the next blank or parameter.
        r"(?:[bru]?\"(?:[^\"\\]|\\.)*\"?|[bru]?'(?:[^'\\]|\\.)*'?|\\\"(?:(?!\\\").)*(?:\\\")?|[^\s&]+)",
        re.IGNORECASE,
    )


class _Rules:
    """Redaction rules of this process. Rules are only added, never removed."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._names = list(_NAMES)
        self.stems = list(_STEMS)
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
        self.named = _named_values(self._names)
        self.name = re.compile(rf"(?:{'|'.join([*self._names, 'authorization'])})(?:[_-][\w-]*)?$", re.IGNORECASE)


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
    if "PRIVATE KEY-----" in text:
        text = _REST_OF_KEY.sub(MASK, _PRIVATE_KEY.sub(MASK, text))
    if "://" in text:
        text = _CREDENTIALS.sub(rf"\g<user>:{MASK}@", text)
        text = _WEB_KEY.sub(rf"\g<scheme>{MASK}@", text)
    lower = text.lower()
    if "authorization" in lower:
        text = _AUTHORIZATION.sub(rf"\g<name>{MASK}", text)
    if any(stem in lower for stem in _rules.stems):
        text = _rules.named.sub(rf"\g<name>{MASK}", text)
    if "bearer" in lower or "basic" in lower:
        text = _BEARER.sub(rf"\g<name> {MASK}", text)
    if "hf_" in text:
        text = _OWN_TOKEN.sub(rf"\g<name>{MASK}", text)
    if any(stem in text for stem in _AWS_STEMS):
        text = _AWS_KEY.sub(MASK, text)
    if "eyJ" in text:
        text = _JWT.sub(MASK, text)
    for pattern in _rules.patterns:
        text = pattern.sub(MASK, text)
    return text


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
