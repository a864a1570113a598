"""Signatures: the specification's own example, and everything that a receiver must refuse."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from holdfast.core.webhook_url import parse_secrets
from holdfast.errors import InvalidOption, SignatureInvalid
from holdfast.webhooks import InMemoryDeliveryStore, sign, verify
from tests.webhooks.receiver import OTHER_SECRET, SECRET

NOW = datetime(2026, 11, 15, 12, 0, tzinfo=UTC)
AT = int(NOW.timestamp())
BODY = b'{"type":"job.succeeded","timestamp":"2026-11-15T12:00:00Z","data":{"job_id":"a"}}'


def headers(body: bytes = BODY, secret: str = SECRET, at: int = AT) -> dict[str, str]:
    return sign(parse_secrets(secret), "msg_1", at, body)


def test_the_example_of_the_specification() -> None:
    # From the Standard Webhooks specification's reference libraries.
    secret = parse_secrets("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    signed = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signed == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


def test_a_signed_delivery_is_decoded() -> None:
    message = verify(headers(), BODY, SECRET, now=NOW)
    assert (message.id, message.type, message.timestamp, message.data) == (
        "msg_1",
        "job.succeeded",
        NOW,
        {"job_id": "a"},
    )
    title_case = {name.title(): value for name, value in headers().items()}
    assert verify(title_case, BODY.decode(), SECRET, now=NOW) == message


def test_either_end_may_have_both_secrets_during_a_rotation() -> None:
    both = f"{OTHER_SECRET} {SECRET}"
    assert verify(headers(secret=both), BODY, SECRET, now=NOW).id == "msg_1"
    assert verify(headers(secret=both), BODY, OTHER_SECRET, now=NOW).id == "msg_1"
    assert verify(headers(), BODY, both, now=NOW).id == "msg_1"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"webhook-id": "msg_2"}, "does not match"),
        ({"webhook-timestamp": str(AT + 1)}, "does not match"),
        ({"webhook-signature": "v1,AAAA"}, "does not match"),
        ({"webhook-signature": "v1,äöü"}, "does not match"),
        ({"webhook-signature": "v1a," + "A" * 44}, "does not match"),
        ({"webhook-signature": ""}, "header webhook-signature is missing"),
        ({"webhook-id": ""}, "header webhook-id is missing"),
        ({"webhook-timestamp": "soon"}, "not a number"),
        ({"webhook-timestamp": "-5"}, "not a number"),
        ({"webhook-timestamp": "9" * 30}, "not a number"),
    ],
)
def test_a_changed_header_is_refused(change: dict[str, str], reason: str) -> None:
    with pytest.raises(SignatureInvalid, match=reason):
        verify(headers() | change, BODY, SECRET, now=NOW)


def test_another_body_or_another_secret_is_refused() -> None:
    with pytest.raises(SignatureInvalid, match="does not match"):
        verify(headers(), BODY + b" ", SECRET, now=NOW)
    with pytest.raises(SignatureInvalid, match="does not match"):
        verify(headers(), BODY, OTHER_SECRET, now=NOW)
    with pytest.raises(InvalidOption, match="whsec_"):
        verify(headers(), BODY, "whsec_short", now=NOW)


@pytest.mark.parametrize("offset", [timedelta(minutes=5, seconds=1), -timedelta(minutes=5, seconds=1)])
def test_old_and_future_timestamps_are_refused(offset: timedelta) -> None:
    with pytest.raises(SignatureInvalid, match="outside the tolerance"):
        verify(headers(), BODY, SECRET, now=NOW + offset)
    assert verify(headers(), BODY, SECRET, now=NOW + offset, tolerance=timedelta(minutes=6)).id == "msg_1"


def test_a_replayed_signature_is_refused_and_a_second_attempt_is_not() -> None:
    seen = InMemoryDeliveryStore()
    now = datetime.now(UTC)
    first = headers(at=int(now.timestamp()))
    assert verify(first, BODY, SECRET, seen=seen, now=now).id == "msg_1"
    with pytest.raises(SignatureInvalid, match="already received"):
        verify(first, BODY, SECRET, seen=seen, now=now + timedelta(minutes=4))
    # A retry has the same id and another timestamp.
    retry = headers(at=int(now.timestamp()) + 5)
    assert verify(retry, BODY, SECRET, seen=seen, now=now).id == "msg_1"


def test_a_forged_request_does_not_use_up_an_id() -> None:
    seen = InMemoryDeliveryStore()
    with pytest.raises(SignatureInvalid):
        verify(headers(secret=OTHER_SECRET), BODY, SECRET, seen=seen, now=NOW)
    assert verify(headers(), BODY, SECRET, seen=seen, now=NOW).id == "msg_1"


def test_expired_deliveries_are_removed() -> None:
    seen = InMemoryDeliveryStore()
    past = datetime.now(UTC) - timedelta(seconds=1)
    assert all(seen.add(f"delivery-{number}", past) for number in range(1_000))
    assert seen.add("last", datetime.now(UTC) + timedelta(minutes=10))
    assert len(seen) == 1


def test_a_signed_body_in_another_format_is_refused() -> None:
    for body in (b"{}", b"\xff", b"[1]", b""):
        with pytest.raises(SignatureInvalid, match="not a holdfast webhook"):
            verify(headers(body), body, SECRET, now=NOW)


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_%%%%", "whsec_YWJj", "secret", "whsec_" + "A" * 120])
def test_invalid_secrets_are_refused(text: str) -> None:
    if not text:
        assert parse_secrets(text) == ()
        return
    with pytest.raises(InvalidOption, match="base64") as caught:
        parse_secrets(text)
    assert text not in str(caught.value) or text in ("whsec_", "secret")


@pytest.mark.parametrize("change", [{"webhook-id": "a\ud800"}, {"webhook-signature": "v1,\ud800"}])
def test_a_header_with_a_lone_surrogate_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(SignatureInvalid):
        verify(headers() | change, BODY, SECRET, now=NOW)


def test_a_body_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(SignatureInvalid):
        verify(headers(), BODY.decode() + "\ud800", SECRET, now=NOW)


def test_a_signed_body_that_cannot_be_read_is_refused() -> None:
    deep = b'{"type":"a","timestamp":"2026-11-15T12:00:00Z","data":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}"
    with pytest.raises(SignatureInvalid):
        verify(headers(deep), deep, SECRET, now=NOW)
