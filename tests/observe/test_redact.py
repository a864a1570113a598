"""Secrets are redacted in every form and every context."""

from __future__ import annotations

import base64
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Settings
from holdfast.errors import InvalidOption
from holdfast.observe import redact as module
from holdfast.observe.redact import MASK, add_redaction_rules, redact, redact_and_truncate, redact_value

SECRET = "hunter2-Zx9q"
KEY_BODY = "MIIEpAIBAAKCAQEA7" + "c3Rvbmc" * 20


@pytest.mark.parametrize(
    "text",
    [
        f"redis://app:{SECRET}@cache:6379/0",
        f"postgresql://app:{SECRET}@db/x?sslmode=require refused",
        f"amqp://:{SECRET}@broker",
        f"https://host/path?a=1&token={SECRET}&b=2",
        f"git clone https://{SECRET}@host/repo",
        f"password={SECRET}",
        f"PASSWORD = '{SECRET} with blanks'",
        f'{{"password": "{SECRET}"}}',
        f'{{"db_password":"a\\"{SECRET}","next":1}}',
        f"{{'api_key': '{SECRET}', 'x': 1}}",
        f"{{'apiKey': b'{SECRET}'}}",
        f"Settings(secret_access_key={SECRET}, region=eu)",
        f"export HOLDFAST_TOKEN={SECRET}",
        f'the body was {{\\"client_secret\\": \\"{SECRET} and more\\"}}',
        f"Authorization: Bearer {SECRET}",
        f"authorization: Digest username=x, response={SECRET}",
        f"headers={{'Authorization': 'Basic {base64.b64encode(SECRET.encode()).decode()}{SECRET}'}}",
        f"[('authorization', 'Bearer {SECRET}')]",
        f"curl -H 'X: bearer {SECRET}'",
        f"hf_a1b2c3_{SECRET}",
        f"Set-Cookie: session={SECRET}",
        f"X-Api-Key: {SECRET}",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
        f"-----BEGIN RSA PRIVATE KEY-----\\n{SECRET}",
        f"{SECRET}\n-----END EC PRIVATE KEY-----",
    ],
)
def test_a_secret_is_redacted(text: str) -> None:
    redacted = redact(text)
    assert SECRET not in redacted
    assert MASK in redacted


@pytest.mark.parametrize("key", ["AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE"])
def test_aws_keys_are_known_by_their_form(key: str) -> None:
    assert redact(f"denied for {key}.") == "denied for ***."


def test_a_json_web_token_is_known_by_its_form() -> None:
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
    assert redact(f"expired: {token}") == "expired: ***"


@pytest.mark.parametrize(
    "text",
    [
        "ada@example.org at 10:30",
        "sqlite:////tmp/a.db",
        "postgresql://postgres@db/x",
        "https://host/a@b",
        "max_tokens=100 of 200",
        "KeyError: 'article'",
        "the basic training is over",
        "unexpected end of file at 3:14",
        'File "/srv/app/tokenizer.py", line 3, in parse',
    ],
)
def test_other_text_is_kept(text: str) -> None:
    assert redact(text) == text


_secrets = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=12, max_size=40).map(
    lambda s: f"Zq{s}"
)
_noise = st.text(st.characters(codec="utf-8"), max_size=60)
_forms = st.sampled_from(
    [
        "redis://user:{}@host/0",
        "password={}",
        "token: {}",
        '"secret": "{}"',
        "'api-key' = '{}'",
        "Authorization: Bearer {}",
        "hf_0a1b_{}",
        "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----",
    ]
)


@given(secret=_secrets, form=_forms, before=_noise, after=_noise)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_secrets_are_redacted_in_any_context(secret: str, form: str, before: str, after: str) -> None:
    text = f"{before} {form.format(secret)} {after}"
    if secret in before + after:
        return
    assert secret not in redact(text)
    assert secret not in redact_and_truncate(text, 2_000)
    assert secret not in json.dumps(redact_value({"message": text, "deep": [{"list": [text]}]}))


@given(
    secret=_secrets, name=st.sampled_from(["password", "db_password", "X-Api-Key", "authorization", "refresh_token"])
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_values_under_sensitive_names_are_masked(secret: str, name: str) -> None:
    assert redact_value({name: {"nested": [secret]}, "ok": 1}) == {name: MASK, "ok": 1}


def test_nested_values_are_redacted_up_to_a_depth() -> None:
    deep: object = f"password={SECRET}"
    for _ in range(100):
        deep = [deep]
    assert SECRET not in str(redact_value(deep))
    assert redact_value((1, 2.5, None, True, {3})) == [1, 2.5, None, True, [3]]
    assert SECRET not in redact_value(ValueError(f"token={SECRET}"))


@pytest.mark.parametrize("end", [False, True])
def test_truncating_a_huge_text_leaves_no_part_of_a_secret(end: bool) -> None:
    text = f"redis://app:{SECRET}@cache " * 20_000
    started = time.thread_time()
    redacted = redact_and_truncate(text, 500, end=end)
    assert len(redacted) <= 500
    assert SECRET[:6] not in redacted
    assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    "piece", ["a", "a://b:", "password=", "password='", "-----BEGIN PRIVATE KEY-----", "eyJ", "-eyJ", "\\", "secret_"]
)
def test_redaction_time_is_bounded(piece: str) -> None:
    text = piece * (128_000 // len(piece))
    started = time.thread_time()
    redact(text)
    assert time.thread_time() - started < 2


def test_a_truncated_private_key_is_redacted() -> None:
    text = f"-----BEGIN PRIVATE KEY-----\n{KEY_BODY}"
    assert KEY_BODY[:20] not in redact_and_truncate(text, 100)


@pytest.fixture
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_rules", module._Rules())


@pytest.mark.usefixtures("own_rules")
def test_the_setting_adds_names_and_expressions() -> None:
    assert redact("iban=DE02 order-4711") == "iban=DE02 order-4711"
    add_redaction_rules(Settings.load(redact=["iban", r"order-\d+"]).redact)
    add_redaction_rules(["iban"])
    assert redact("iban=DE02 order-4711") == "iban=*** ***"
    assert redact_value({"customer_iban": "DE02"}) == {"customer_iban": MASK}


@pytest.mark.parametrize("rule", ["(", "", "x*"])
def test_an_invalid_rule_is_refused(rule: str) -> None:
    with pytest.raises(InvalidOption, match="redact"):
        Settings.load(redact=[rule])
