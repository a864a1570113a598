"""One delivery attempt: what is sent, and how the sender handles misbehaving receivers and resolvers."""

from __future__ import annotations

import asyncio
import socket
import time
import traceback
from collections.abc import Sequence
from ipaddress import ip_address

import pytest

from holdfast.core.webhook_url import Address
from holdfast.errors import Fatal
from holdfast.settings import Settings
from holdfast.verification.chaos.servers import free_port
from holdfast.webhooks import sender, verify
from holdfast.webhooks.sender import DeliveryFailed, WebhookSender
from tests.webhooks.receiver import OK, OTHER_SECRET, SECRET, Receiver, is_signed, run_receiver, status

BODY = b'{"type":"job.succeeded","timestamp":"2026-11-15T12:00:00Z","data":{}}'


def settings(**options: object) -> Settings:
    return Settings.load(
        **({"webhook_secret": SECRET, "webhook_allow": ["127.0.0.1"], "webhook_timeout_s": 5} | options)
    )


class StubResolver:
    """A resolver with fixed answers; each lookup takes the next."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.lookups: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.lookups.append(host)
        return [ip_address(text) for text in self.answers.pop(0)]


async def test_a_delivery_is_signed_and_accepted(receiver: Receiver) -> None:
    assert await WebhookSender(settings()).send(receiver.url, "msg_1", BODY) == 204
    [request] = receiver.requests
    assert request.line == "POST /hook?key=s3cret HTTP/1.1"
    assert request.body == BODY
    assert request.headers["content-type"] == "application/json"
    assert request.headers["host"] == f"127.0.0.1:{receiver.port}"
    assert request.headers["user-agent"].startswith("holdfast/")
    assert abs(int(request.headers["webhook-timestamp"]) - time.time()) < 5
    assert is_signed(request, SECRET)
    assert not is_signed(request, OTHER_SECRET)
    assert verify(request.headers, request.body, SECRET).id == "msg_1"


async def test_both_secrets_sign_during_a_rotation(receiver: Receiver) -> None:
    await WebhookSender(settings(webhook_secret=f"{SECRET} {OTHER_SECRET}")).send(receiver.url, "msg_1", BODY)
    assert is_signed(receiver.requests[0], SECRET)
    assert is_signed(receiver.requests[0], OTHER_SECRET)


async def test_a_subscriber_can_have_its_own_secret(receiver: Receiver) -> None:
    hooks = [{"url": receiver.url, "events": ["alert.*"], "secret": OTHER_SECRET}]
    await WebhookSender(settings(webhooks=hooks)).send(receiver.url, "msg_1", BODY)
    assert is_signed(receiver.requests[0], OTHER_SECRET)
    assert not is_signed(receiver.requests[0], SECRET)


@pytest.mark.parametrize("code", [400, 401, 404, 408, 409, 429, 500, 502, 503])
async def test_an_error_status_is_retried(receiver: Receiver, code: int) -> None:
    receiver.answers = [status(code)]
    with pytest.raises(DeliveryFailed, match=str(code)) as caught:
        await WebhookSender(settings()).send(receiver.url, "msg_1", BODY)
    assert "s3cret" not in str(caught.value)


async def test_status_410_is_permanent(receiver: Receiver) -> None:
    receiver.answers = [status(410)]
    with pytest.raises(Fatal, match="410"):
        await WebhookSender(settings()).send(receiver.url, "msg_1", BODY)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_redirects_are_not_followed(receiver: Receiver, code: int) -> None:
    async with run_receiver() as elsewhere:
        receiver.answers = [status(code, f"location: {elsewhere.url}")]
        with pytest.raises(DeliveryFailed, match=str(code)):
            await WebhookSender(settings()).send(receiver.url, "msg_1", BODY)
        assert elsewhere.connections == 0


async def test_proxies_of_the_environment_are_not_used(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_receiver() as proxy:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        await WebhookSender(settings()).send(receiver.url, "msg_1", BODY)
        assert (len(receiver.requests), proxy.connections) == (1, 0)


async def test_a_refused_connection_is_retried() -> None:
    with pytest.raises(DeliveryFailed, match="is unreachable"):
        await WebhookSender(settings()).send(f"http://127.0.0.1:{free_port()}/", "msg_1", BODY)


# Targets that are refused --------------------------------------------------------------------------


@pytest.fixture
def short_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "_REFUSAL_S", 0.0)


NAMELESS = (
    "http://example.org has no address on the public internet; an operator can allow an internal one with "
    "HOLDFAST_WEBHOOK_ALLOW"
)


@pytest.mark.usefixtures("short_refusals")
@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["10.0.0.1"], ["169.254.169.254"], ["::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"],
     ["fd00::1"], ["8.8.8.8", "192.168.0.1"], ["192.168.0.1", "8.8.8.8"], []],
)  # fmt: skip
async def test_names_of_private_addresses_are_refused(receiver: Receiver, addresses: list[str]) -> None:
    resolver = StubResolver(addresses)
    with pytest.raises(DeliveryFailed) as caught:
        await WebhookSender(settings(webhook_allow=[]), resolver).send(
            f"http://example.org:{receiver.port}/", "msg_1", BODY
        )
    assert str(caught.value) == NAMELESS.replace(".org", f".org:{receiver.port}")
    assert resolver.lookups == ["example.org"]
    assert receiver.connections == 0


async def _no_such_name(host: str, port: int) -> Sequence[Address]:
    raise socket.gaierror(-2, "Name or service not known")


async def _never(host: str, port: int) -> Sequence[Address]:
    await asyncio.sleep(3_600)
    raise AssertionError


async def test_an_internal_name_fails_like_one_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The same class, text, stack and duration, so the same code, retries and history. Only the log has the cause."""
    monkeypatch.setattr(sender, "_REFUSAL_S", 0.2)
    failures = []
    for resolve in (_no_such_name, StubResolver(["10.0.0.1"]), StubResolver([]), _never):
        started = time.monotonic()
        with pytest.raises(DeliveryFailed) as caught:
            await WebhookSender(settings(webhook_allow=[], webhook_timeout_s=0.1), resolve).send(
                "http://example.org/", "msg_1", BODY
            )
        assert time.monotonic() - started >= 0.2
        frames = [(frame.name, frame.lineno) for frame in traceback.extract_tb(caught.tb)][1:]
        assert caught.value.__context__ is None
        failures.append((str(caught.value), frames))
    assert {message for message, _ in failures} == {NAMELESS}
    assert [frames for _, frames in failures] == [failures[0][1]] * 4
    causes = [record.getMessage().partition("not sent: ")[2] for record in caplog.records]
    assert [cause[:30] for cause in causes] == [
        "[Errno -2] Name or service not",
        "webhook: example.org is not on",
        "the host name has no address",
        "the lookup took more than 0.1 ",
    ]


async def test_the_checked_address_is_the_one_that_is_used(receiver: Receiver) -> None:
    """DNS rebinding: a second lookup would return another address, so the sender makes only one."""
    resolver = StubResolver(["127.0.0.1"], ["10.6.6.6"])
    assert await WebhookSender(settings(), resolver).send(f"http://example.org:{receiver.port}/", "msg_1", BODY) == 204
    assert resolver.lookups == ["example.org"]
    # The Host header has the name, not the address.
    assert receiver.requests[0].headers["host"] == f"example.org:{receiver.port}"


@pytest.mark.usefixtures("short_refusals")
async def test_a_name_that_later_resolves_to_a_private_address_is_refused(receiver: Receiver) -> None:
    checked = WebhookSender(settings(webhook_allow=["127.0.0.1/32"]), StubResolver(["127.0.0.1"], ["127.0.0.2"]))
    url = f"http://example.org:{receiver.port}/"
    assert await checked.send(url, "msg_1", BODY) == 204
    with pytest.raises(DeliveryFailed, match="public internet"):
        await checked.send(url, "msg_1", BODY)


async def test_the_next_address_is_tried(receiver: Receiver) -> None:
    allowed = settings(webhook_allow=["127.0.0.0/8"])
    resolver = StubResolver(["127.6.6.6", "127.0.0.1"])
    assert await WebhookSender(allowed, resolver).send(f"http://example.org:{receiver.port}/", "msg_1", BODY) == 204


async def test_a_target_that_is_no_longer_allowed_is_refused(receiver: Receiver) -> None:
    with pytest.raises(Fatal, match="public internet"):
        await WebhookSender(settings(webhook_allow=[])).send(receiver.url, "msg_1", BODY)
    with pytest.raises(Fatal, match="no secret"):
        await WebhookSender(settings(webhook_secret=None)).send(receiver.url, "msg_1", BODY)
    assert receiver.connections == 0


# Receivers that misbehave --------------------------------------------------------------------------


async def test_a_silent_receiver_times_out(receiver: Receiver) -> None:
    async def silent(_: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    receiver.answers = [silent]
    started = time.monotonic()
    with pytest.raises(DeliveryFailed, match=r"did not respond within 0\.3 s"):
        await WebhookSender(settings(webhook_timeout_s=0.3)).send(receiver.url, "msg_1", BODY)
    assert time.monotonic() - started < 5


async def test_a_receiver_that_drips_its_headers_times_out(receiver: Receiver) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: 1\r\n")
            await writer.drain()
            await asyncio.sleep(0.02)

    receiver.answers = [drip]
    with pytest.raises(DeliveryFailed, match="did not respond"):
        await WebhookSender(settings(webhook_timeout_s=0.3)).send(receiver.url, "msg_1", BODY)


async def test_endless_headers_are_not_read_to_their_end(receiver: Receiver) -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x-more: " + b"1" * 1000 + b"\r\n")
            sent += 1000
            await writer.drain()

    receiver.answers = [flood]
    with pytest.raises(DeliveryFailed, match="invalid HTTP response"):
        await WebhookSender(settings()).send(receiver.url, "msg_1", BODY)
    assert sent < 20_000_000


async def test_only_the_beginning_of_a_huge_response_is_read(receiver: Receiver) -> None:
    sent = 0

    async def flood(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000000000\r\n\r\n")
        while True:
            writer.write(b"x" * 65536)
            sent += 65536
            await writer.drain()

    receiver.answers = [flood]
    assert await WebhookSender(settings()).send(receiver.url, "msg_1", BODY) == 200
    assert sent < 50_000_000


async def test_an_endless_response_is_judged_by_its_status(receiver: Receiver) -> None:
    async def slow(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 100\r\n\r\nx")
        await writer.drain()
        await asyncio.sleep(30)

    receiver.answers = [slow]
    assert await WebhookSender(settings()).send(receiver.url, "msg_1", BODY) == 202


@pytest.mark.parametrize("response", [b"", b"garbage\r\n\r\n", b"\x00\x00\x00", b"HTTP/1.1 999999 x\r\n\r\n"])
async def test_an_invalid_response_is_retried(receiver: Receiver, response: bytes) -> None:
    receiver.answers = [response, OK]
    with pytest.raises(DeliveryFailed):
        await WebhookSender(settings()).send(receiver.url, "msg_1", BODY)
    assert await WebhookSender(settings()).send(receiver.url, "msg_1", BODY) == 204
