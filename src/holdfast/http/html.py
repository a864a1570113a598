"""HTML pages of the service: escaped markup, one inline style, a strict content security policy.

Pages need no JavaScript and load no scripts, fonts or images, neither from this server nor from another.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from typing import Final

from holdfast.http.operation import Reply

CONTENT_TYPE: Final = "text/html; charset=utf-8"
_VOID: Final = frozenset({"link", "meta"})

_STYLE: Final = """
:root { color-scheme: light dark; --line: #d5d9de; --soft: #f4f5f7; --dim: #5b6470; --link: #0b5cad; --good: #1a7f4b; }
@media (prefers-color-scheme: dark) {
  :root { --line: #3a4048; --soft: #22262b; --dim: #a3acb8; --link: #7db8f5; --good: #5cc98e; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; }
h2 { font-size: 1.2rem; margin: 2.25rem 0 .5rem; }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { margin: .5rem 0; }
a { color: var(--link); }
code, pre { font: .875rem/1.45 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem;
  overflow-x: auto; overflow-wrap: normal; }
.dim { color: var(--dim); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; }
td:first-child { white-space: nowrap; }
nav a { display: inline-block; margin: 0 .75rem .25rem 0; }
details { border: 1px solid var(--line); border-radius: 6px; margin: .4rem 0; padding: 0 .8rem; }
details[open] { padding-bottom: .6rem; }
summary { cursor: pointer; margin: 0 -.8rem; padding: .45rem .8rem; }
details > div { scroll-margin-top: 4.5rem; }
summary .dim { display: block; padding-left: 5.2rem; }
.method { display: inline-block; min-width: 4.25rem; font-weight: 700; }
.GET { color: var(--link); }
.POST { color: var(--good); }
"""
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_HEADERS: Final = [
    (
        b"content-security-policy",
        f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'".encode(),
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class Html(str):
    """Markup. Text that is not `Html` is escaped when it is put into an element."""

    __slots__ = ()


def element(tag: str, *content: str | Iterable[Html], **attributes: str) -> Html:
    """Build an element. `class_` sets `class`, which is a Python keyword."""
    given = "".join(f' {name.rstrip("_")}="{escape(value)}"' for name, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{tag}{given}>")
    return Html(f"<{tag}{given}>{join(*content)}</{tag}>")


def join(*content: str | Iterable[Html]) -> Html:
    """Concatenate pieces."""
    return Html("".join(_piece(each) for each in content))


def _piece(content: str | Iterable[Html]) -> str:
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return escape(content)
    return "".join(_piece(each) for each in content)


def code(text: str) -> Html:
    return element("code", text)


def prose(text: str) -> Html:
    """Render text with `code` between backticks, as in docstrings."""
    return join([code(part) if number % 2 else join(part) for number, part in enumerate(text.split("`"))])


def fold(title: Html, *content: Html, anchor: str) -> Html:
    """Build a section that is collapsed until it is clicked, or until a link to it is followed."""
    # Browsers expand it for a link to an element inside, not for one to the element itself.
    inside = element("div", content, id=anchor)
    return element("details", element("summary", title), inside)


def link(text: str | Html, href: str) -> Html:
    return element("a", text, href=href)


def table(titles: Iterable[str], rows: Iterable[Iterable[str | Html]]) -> Html:
    """Build a table that scrolls horizontally on narrow screens."""
    head = element("tr", [element("th", title) for title in titles])
    body = [element("tr", [element("td", cell) for cell in row]) for row in rows]
    return element("div", element("table", element("thead", head), element("tbody", body)), class_="wide")


def page(title: str, *content: Html, status: int = 200) -> Reply:
    """Build a complete page as a response."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="robots", content="noindex"),
        element("title", title),
        # Without it browsers request /favicon.ico.
        element("link", rel="icon", href="data:,"),
        element("style", Html(_STYLE)),
    )
    markup = f"<!doctype html>{element('html', head, element('body', element('main', content)), lang='en')}"
    return Reply(markup.encode(), status, list(_HEADERS), CONTENT_TYPE)
