"""The start page, the API docs and the link of dev mode, as a browser gets them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI

from holdfast import Holdfast
from holdfast.http import mount
from holdfast.http.auth import DevAuthenticator
from tests.http.deployment import Deployment, sample, serving

#: As a browser sends them when an address is typed.
_BROWSER: Final = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "sec-fetch-site": "none"}
_MARKUP: Final = "<script>'\"&"


class _Page(HTMLParser):
    """The elements, links, ids and text of a page."""

    def __init__(self, reply: httpx.Response) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(reply.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        values = dict(attrs)
        if tag == "a":
            self.links.append(values["href"] or "")
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Deployment]:
    app = sample(f"sqlite:///{tmp_path / 'jobs.db'}")

    @app.task(name=_MARKUP)
    async def awkward(text: str = _MARKUP, pair: tuple[int, str] = (1, "")) -> None: ...

    with serving(app, dev=True, upkeep=False) as deployment:
        yield deployment


def _link(deployment: Deployment) -> str:
    authenticator = deployment.service.authenticator
    assert isinstance(authenticator, DevAuthenticator)
    return authenticator.link(deployment.base)


def test_the_link_leads_a_browser_to_the_start_page(dev: Deployment) -> None:
    browser = dev.anonymous(**_BROWSER)
    browser.follow_redirects = True
    before = _Page(browser.get("/"))
    assert "not signed in" in before.text
    assert _MARKUP not in before.text
    start = browser.get(_link(dev))
    assert (start.status_code, start.url.path) == (200, "/")
    page = _Page(start)
    assert "Signed in as dev" in page.text
    assert {"docs", "openapi.json", "readyz", "healthz", "metrics"} <= set(page.links)
    docs = _Page(browser.get("/docs"))
    for href in page.links:
        url = start.url.join(href)
        assert browser.get(url).status_code == 200
        assert not url.fragment or url.fragment in docs.ids


def test_a_used_link_says_how_to_get_another(dev: Deployment) -> None:
    browser, link = dev.anonymous(**_BROWSER), _link(dev)
    assert browser.get(link).status_code == 303
    other = dev.anonymous(**_BROWSER)
    used = other.get(link)
    assert (used.status_code, used.headers["content-type"]) == (410, "text/html; charset=utf-8")
    text = _Page(used).text
    assert "has been used" in text
    command = f"curl -X POST {dev.base}/dev"
    assert command in text
    assert "not signed in" in _Page(other.get("/")).text
    # A local program may get a new link; a page in a browser that is not signed in may not.
    assert other.post("/dev").status_code == 401
    assert dev.anonymous(origin="http://evil.example").post("/dev").status_code == 401
    another = dev.anonymous().post("/dev").json()["link"]
    assert another.startswith(f"{dev.base}/dev?key=")
    assert other.get(another).status_code == 303
    assert "Signed in" in _Page(other.get("/")).text
    problem = dev.anonymous().get(link)
    assert (problem.status_code, problem.json()["code"]) == (410, "DEV_LINK_USED")


def test_a_link_of_another_server_is_not_valid(dev: Deployment) -> None:
    replaced = _link(dev)
    dev.anonymous().post("/dev")
    for link in (replaced, "/dev?key=another", "/dev?key=%3Cb%3E"):
        reply = dev.anonymous(**_BROWSER).get(link)
        assert reply.status_code == 404
        assert "not valid" in _Page(reply).text
        assert "b" not in _Page(reply).tags


def test_without_dev_mode_there_is_no_link(shared: Deployment) -> None:
    reply = shared.anonymous(**_BROWSER).get("/dev?key=x")
    assert (reply.status_code, reply.headers["content-type"]) == (404, "application/problem+json")
    assert shared.client().post("/dev").status_code == 404
    assert shared.anonymous().post("/dev").status_code == 401


def test_tasks_are_shown_only_to_callers_with_a_token(shared: Deployment) -> None:
    """As in the OpenAPI document."""
    for path in ("/", "/docs"):
        assert "flaky" not in _Page(shared.anonymous(**_BROWSER).get(path)).text
        assert "flaky" in _Page(shared.client().get(path)).text
    text = _Page(shared.anonymous().get("/")).text
    assert "holdfast token create" in text
    assert "Bearer $TOKEN" in text


def test_the_docs_show_every_operation_and_every_schema(shared: Deployment) -> None:
    page = _Page(shared.client().get("/docs"))
    document = shared.client().get("/openapi.json").json()
    operations = [each for methods in document["paths"].values() for each in methods.values()]
    for operation in operations:
        assert operation["operationId"] in page.ids
        assert operation["summary"].replace("`", "") in page.text
    assert {f"schema-{name}" for name in document["components"]["schemas"]} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert {href[1:] for href in page.links if href.startswith("#")} <= set(page.ids)


@pytest.mark.parametrize("path", ["/", "/docs", "/dev?key=x"])
def test_pages_load_nothing_and_run_nothing(dev: Deployment, path: str) -> None:
    reply = dev.anonymous(accept="text/html").get(path)
    page = _Page(reply)
    assert page.tags.isdisjoint({"script", "img", "iframe", "form", "base"})
    assert page.attributes.isdisjoint({"src", "style", "onclick", "onload"})
    assert all("//" not in href for href in page.links)
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    style = reply.text.partition("<style>")[2].partition("</style>")[0]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert path == "/dev?key=x" or "<script>'" in page.text


@pytest.mark.parametrize("host", ["evil.example/<b>", "$(reboot)", '"><b>'])
def test_an_invalid_host_is_not_repeated(shared: Deployment, host: str) -> None:
    for path in ("/", "/docs"):
        assert host not in _Page(shared.anonymous(host=host).get(path)).text


def test_links_work_under_a_prefix(tmp_path: Path) -> None:
    app, shop = Holdfast(f"sqlite:///{tmp_path / 'jobs.db'}"), FastAPI()
    inner = mount(shop, app, prefix="/tasks", dev=True, upkeep=False)
    with serving(app, api=shop) as deployment:
        browser = deployment.anonymous(**_BROWSER)
        browser.follow_redirects = True
        authenticator: DevAuthenticator = inner.state.service.authenticator
        start = browser.get(authenticator.link(f"{deployment.base}/tasks"))
        assert start.url.path == "/tasks/"
        for href in _Page(start).links:
            assert browser.get(urljoin(str(start.url), href)).status_code == 200
        docs = browser.get("/tasks/docs")
        assert f"BASE={deployment.base}/tasks</pre>" in docs.text
        for href in [href for href in _Page(docs).links if not href.startswith("#")]:
            assert browser.get(urljoin(str(docs.url), href)).status_code == 200
        assert browser.get("/tasks").url.path == "/tasks/"
