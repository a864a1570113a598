"""Pages for browsers: the start page, the API docs, and the link of `holdfast serve --dev`.

What they show follows the OpenAPI document's rule: open to all, the app's tasks only to callers who are signed in.
Links are relative, so that they hold under any prefix.
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
    """A link that signs one browser in, once."""

    link: str


async def caller_of(call: Call) -> Principal | None:
    """Who asks; None without a valid token, or while tokens cannot be read."""
    try:
        return await call.service.authenticator.authenticate(call.scope)
    except (Unauthorized, EngineUnavailable, LedgerUnavailable):
        return None


@operation(
    "GET",
    "/",
    "startPage",
    tag=_TAG,
    right=None,
    answers={200: ResponseSpec("A page with links.", content_type=_HTML, example=_EXAMPLE)},
)
async def start_page(call: Call) -> Reply:
    """The start page: what is here, and where."""
    caller = await caller_of(call)
    links = [
        ("docs", "API docs", "every operation, with a curl command"),
        ("openapi.json", "OpenAPI document", "for code generators"),
        ("readyz", "Readiness", "engine, ledger and worker"),
        ("healthz", "Health", "the process answers"),
        ("metrics", "Metrics", "in Prometheus' format"),
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
    right=None,
    answers={200: ResponseSpec("The OpenAPI document as a page.", content_type=_HTML, example=_EXAMPLE)},
)
async def api_docs(call: Call) -> Reply:
    """The OpenAPI document as a page, with the tasks for callers who have a token."""
    with_tasks = await caller_of(call) is not None
    return page(
        "holdfast API",
        element("p", link("Start page", "./"), " · ", link("OpenAPI document", "openapi.json")),
        element("h1", "holdfast API"),
        element("p", f"Version {__version__}", class_="dim"),
        element("p", prose(call.service.document(with_tasks=with_tasks)["info"]["description"])),
        element("p", "For the examples, set first:"),
        element("pre", _environment(call)),
        call.service.docs(with_tasks=with_tasks),
    )


@operation(
    "GET",
    "/dev",
    "devLink",
    tag=_TAG,
    right=None,
    query=DevQuery,
    answers={303: ResponseSpec("Signed in.", headers={"Location": "The start page.", "Set-Cookie": "The session."})},
    errors=(NotFound, DevLinkUsed),
)
async def dev_link(call: Call) -> Reply:
    """The link that `holdfast serve --dev` prints: signs one browser in, once."""
    query: DevQuery = call.query
    try:
        cookie = _dev_gate(call).exchange(query.key)
    except (DevLinkUsed, NotFound) as exc:
        return _refused(call, exc)
    return Reply(b"", 303, [(b"location", b"./"), (b"set-cookie", cookie.encode())])


@operation(
    "POST",
    "/dev",
    "newDevLink",
    tag=_TAG,
    right=Permission.ADMINISTER,
    all_tenants=True,
    answers={
        200: ResponseSpec(
            "The link. It replaces the one before.", DevLink, example={"link": "http://127.0.0.1:8000/dev?key=…"}
        )
    },
    errors=(NotFound,),
)
async def new_dev_link(call: Call) -> Reply:
    """Another link for a browser. Only with `holdfast serve --dev`."""
    gate = _dev_gate(call)
    gate.renew()
    return Reply(DevLink(link=gate.link(_base(call))))


# Inside --------------------------------------------------------------------------------------------------


def _dev_gate(call: Call) -> DevAuthenticator:
    gate = call.service.authenticator
    if not isinstance(gate, DevAuthenticator):
        raise NotFound("dev link", "here")
    return gate


def _refused(call: Call, error: HoldfastError) -> Reply:
    """Why a link does not sign in, and how to get another: as a page for browsers."""
    if not isinstance(call.service.authenticator, DevAuthenticator) or _HTML not in (call.header("accept") or ""):
        return problem_reply(error, call.scope)
    used = isinstance(error, DevLinkUsed)
    title = "This link has been used" if used else "This link is not valid"
    cause = (
        "A link signs one browser in, once."
        if used
        else "It is not a link of this server. Links end with the server that printed them, and when a new one is made."
    )
    return page(
        title,
        element("h1", title),
        element("p", cause),
        element("p", "To get another one, run this in a terminal, or restart ", code("holdfast serve --dev"), ":"),
        element("pre", f"curl -X POST {shlex.quote(_base(call) + '/dev')}"),
        element("p", "A browser that is already signed in stays so: ", link("open the start page", "./"), "."),
        status=status_of(type(error)),
    )


def _base(call: Call) -> str:
    """The address of the service as the caller wrote it. What could not be a host's name is not repeated."""
    host = call.header("host") or ""
    if not _HOST.fullmatch(host):
        host = "127.0.0.1:8000"
    return f"{call.scope.get('scheme', 'http')}://{host}{call.scope.get('root_path', '')}"


def _environment(call: Call) -> str:
    """The variables that the examples use."""
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
        return element("p", "This server has no app: jobs of any task are passed on to the workers.")
    rows = [element("li", link(code(task), f"docs#{schema_id(ref)}")) for task, ref in refs.items()]
    return join(element("h2", "Tasks"), element("ul", rows))


def _access(call: Call, caller: Principal | None) -> Html:
    if not isinstance(call.service.authenticator, DevAuthenticator):
        make = code("holdfast token create NAME")
        return join("Requests need a token: ", make, " makes one. With it, the OpenAPI document lists the tasks.")
    if caller is None:
        return join(
            "This browser is not signed in. Open the link that ",
            code("holdfast serve --dev"),
            " printed; ",
            code(f"curl -X POST {shlex.quote(_base(call) + '/dev')}"),
            " prints another.",
        )
    return join("Signed in as ", code(caller.name), ". Programs on this machine need no token.")
