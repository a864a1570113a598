"""Pages for browsers: the start page, the API docs, and the link of `holdfast serve --dev`.

Like the OpenAPI document, they need no token and show the app's tasks only to authenticated callers. Links are
relative, so that they work under any prefix.
"""

from __future__ import annotations

import re
import shlex
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from holdfast._version import __version__
from holdfast.core.principal import Permission, Principal
from holdfast.errors import EngineUnavailable, HoldfastError, LedgerUnavailable, NotFound, Unauthorized
from holdfast.http.api_docs import TOKEN_HEADER, command, schema_id
from holdfast.http.auth import DevAuthenticator, DevLinkUsed
from holdfast.http.html import Html, code, element, join, link, page, prose
from holdfast.http.operation import Call, Reply, ResponseSpec, operation, problem_reply
from holdfast.http.problems import status_of
from holdfast.http.wire import RequestBase

_TAG: Final = "system"
_HTML: Final = "text/html"
_HOST: Final = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")
_EXAMPLE: Final = '<!doctype html><html lang="en">…</html>'


class DevQuery(RequestBase, frozen=True, kw_only=True):
    """The one-time key of the dev link."""

    key: Annotated[str, Meta(min_length=1, max_length=200)]


class DevLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that signs in one browser, once."""

    link: str


async def caller_of(call: Call) -> Principal | None:
    """Principal of the request; None without a valid token, or if tokens cannot be verified now."""
    try:
        return await call.service.authenticator.authenticate(call.scope)
    except (Unauthorized, EngineUnavailable, LedgerUnavailable):
        return None


@operation(
    "GET",
    "/",
    "startPage",
    tag=_TAG,
    permission=None,
    responses={200: ResponseSpec("A page with links.", content_type=_HTML, example=_EXAMPLE)},
)
async def start_page(call: Call) -> Reply:
    """Show the start page with links to the API docs."""
    caller = await caller_of(call)
    links = [
        ("docs", "API docs", "every operation, with a curl command"),
        ("openapi.json", "OpenAPI document", "for code generators"),
        ("readyz", "Readiness", "engine, ledger and worker"),
        ("healthz", "Health", "the process is alive"),
        ("metrics", "Metrics", "in Prometheus format"),
    ]
    rows = [element("li", link(name, href), element("span", f" – {text}", class_="dim")) for href, name, text in links]
    return page(
        "holdfast",
        element("h1", "holdfast"),
        element("p", f"HTTP API, version {__version__}", class_="dim"),
        element("ul", rows),
        _tasks(call) if caller is not None else join(),
        element("h2", "Submit a job"),
        element("pre", _environment(call) + "\n" + _submission(call, caller)),
        element("h2", "Access"),
        element("p", _access(call, caller)),
    )


@operation(
    "GET",
    "/docs",
    "apiDocs",
    tag=_TAG,
    permission=None,
    responses={200: ResponseSpec("The OpenAPI document as HTML.", content_type=_HTML, example=_EXAMPLE)},
)
async def api_docs(call: Call) -> Reply:
    """Show the OpenAPI document as HTML, with the tasks for authenticated callers."""
    with_tasks = await caller_of(call) is not None
    return page(
        "holdfast API",
        element("p", link("Start page", "./"), " · ", link("OpenAPI document", "openapi.json")),
        element("h1", "holdfast API"),
        element("p", f"Version {__version__}", class_="dim"),
        element("p", prose(call.service.document(with_tasks=with_tasks)["info"]["description"])),
        element("p", "The examples use these variables:"),
        element("pre", _environment(call)),
        call.service.docs(with_tasks=with_tasks),
    )


@operation(
    "GET",
    "/dev",
    "devLink",
    tag=_TAG,
    permission=None,
    query=DevQuery,
    responses={303: ResponseSpec("Signed in.", headers={"Location": "The start page.", "Set-Cookie": "The session."})},
    errors=(NotFound, DevLinkUsed),
)
async def dev_link(call: Call) -> Reply:
    """Sign in one browser, once, with the link that `holdfast serve --dev` prints."""
    query: DevQuery = call.query
    try:
        cookie = _dev_authenticator(call).exchange(query.key)
    except (DevLinkUsed, NotFound) as exc:
        return _refusal_page(call, exc)
    return Reply(b"", 303, [(b"location", b"./"), (b"set-cookie", cookie.encode())])


@operation(
    "POST",
    "/dev",
    "newDevLink",
    tag=_TAG,
    permission=Permission.ADMINISTER,
    all_tenants=True,
    responses={
        200: ResponseSpec(
            "The link. It replaces the previous one.", DevLink, example={"link": "http://127.0.0.1:8000/dev?key=…"}
        )
    },
    errors=(NotFound,),
)
async def new_dev_link(call: Call) -> Reply:
    """Create another link for a browser.

    Only with `holdfast serve --dev`.
    """
    authenticator = _dev_authenticator(call)
    authenticator.renew()
    return Reply(DevLink(link=authenticator.link(_base(call))))


# Helpers -------------------------------------------------------------------------------------------------


def _dev_authenticator(call: Call) -> DevAuthenticator:
    authenticator = call.service.authenticator
    if not isinstance(authenticator, DevAuthenticator):
        raise NotFound("dev link", "here")
    return authenticator


def _refusal_page(call: Call, error: HoldfastError) -> Reply:
    """Explain why a link is refused and how to get another, as a page for browsers."""
    if not isinstance(call.service.authenticator, DevAuthenticator) or _HTML not in (call.header("accept") or ""):
        return problem_reply(error, call.scope)
    used = isinstance(error, DevLinkUsed)
    title = "This link has been used" if used else "This link is not valid"
    cause = (
        "A link signs in one browser, once."
        if used
        else "It is not a link of this server. A link expires when its server stops and when a new link is created."
    )
    return page(
        title,
        element("h1", title),
        element("p", cause),
        element(
            "p", "To get another link, run this command in a terminal, or restart ", code("holdfast serve --dev"), ":"
        ),
        element("pre", f"curl -X POST {shlex.quote(_base(call) + '/dev')}"),
        element("p", "A browser that is already signed in stays signed in: ", link("open the start page", "./"), "."),
        status=status_of(type(error)),
    )


def _base(call: Call) -> str:
    """Base URL of the service as the client addressed it. An invalid host name is not echoed."""
    host = call.header("host") or ""
    if not _HOST.fullmatch(host):
        host = "127.0.0.1:8000"
    return f"{call.scope.get('scheme', 'http')}://{host}{call.scope.get('root_path', '')}"


def _environment(call: Call) -> str:
    """Shell variables of the examples."""
    base = f"BASE={shlex.quote(_base(call))}"
    return base if isinstance(call.service.authenticator, DevAuthenticator) else f"{base}\nTOKEN=hf_…"


def _submission(call: Call, caller: Principal | None) -> str:
    paths = call.service.document(with_tasks=caller is not None)["paths"]
    content = paths["/api/v1/jobs"]["post"]["requestBody"]["content"]["application/json"]
    lines = ['curl "$BASE/api/v1/jobs?wait=30"']
    if not isinstance(call.service.authenticator, DevAuthenticator):
        lines.append(TOKEN_HEADER)
    data = msgspec.json.encode(content.get("example", {"task": "…"})).decode()
    return command(*lines, "-H 'content-type: application/json'", f"-d {shlex.quote(data)}")


def _tasks(call: Call) -> Html:
    """The app's tasks with links to their schemas."""
    submission = call.service.document(with_tasks=True)["components"]["schemas"]["SubmitRequest"]
    refs: dict[str, str] = submission.get("discriminator", {}).get("mapping", {})
    if not refs:
        return element("p", "This server has no app: jobs of all tasks that workers have announced are accepted.")
    rows = [element("li", link(code(task), f"docs#{schema_id(ref)}")) for task, ref in refs.items()]
    return join(element("h2", "Tasks"), element("ul", rows))


def _access(call: Call, caller: Principal | None) -> Html:
    if not isinstance(call.service.authenticator, DevAuthenticator):
        make = code("holdfast token create NAME")
        return join(
            "Requests need a token; create one with ", make, ". With a token, the OpenAPI document lists the tasks."
        )
    if caller is None:
        return join(
            "This browser is not signed in. Open the link that ",
            code("holdfast serve --dev"),
            " printed; ",
            code(f"curl -X POST {shlex.quote(_base(call) + '/dev')}"),
            " prints another.",
        )
    return join("Signed in as ", code(caller.name), ". Programs on this machine need no token.")
