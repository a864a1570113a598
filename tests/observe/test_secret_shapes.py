"""Shapes in which secrets occur in logs and errors, and texts that only look like them.

Tokens are built at run time from parts, so that no scanner mistakes this file for a leak.
"""

from __future__ import annotations

import string
import time
from collections.abc import Callable
from itertools import cycle, islice
from typing import Final

import pytest

from holdfast.observe.redact import MASK, redact, redact_value

#: The part that must not survive.
SECRET: Final = "Zx9q" + "Hunter2Tiger"


def _characters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(islice(cycle(alphabet), 7, 7 + count))


_HEX: Final = "0a1b2c3d4e5f6789"


def _token(*parts: str) -> str:
    return "".join(parts)


#: Vendor → a token of its form.
TOKENS: Final = {
    "GitHub personal": _token("gh", "p_", _characters(36)),
    "GitHub OAuth": _token("gh", "o_", _characters(36)),
    "GitHub server": _token("gh", "s_", _characters(36)),
    "GitHub refresh": _token("gh", "r_", _characters(36)),
    "GitHub fine-grained": _token("github", "_pat_", _characters(22), "_", _characters(59)),
    "GitLab personal": _token("gl", "pat-", _characters(20)),
    "GitLab runner": _token("gl", "rt-", _characters(20)),
    "Slack bot": _token("xo", "xb-", "2512345678901-2512345678902-", _characters(24)),
    "Slack user": _token("xo", "xp-", "2512345678901-2512345678902-", _characters(24)),
    "Slack app": _token("xa", "pp-1-A012BCDEFGH-2512345678901-", _characters(64, _HEX)),
    "Slack webhook": _token("https://hooks.sl", "ack.com/services/T01ABCDEF/B01ABCDEF/", _characters(24)),
    "Discord webhook": _token("https://discord", ".com/api/webhooks/123456789012345678/", _characters(68)),
    "Stripe secret": _token("sk", "_live_", _characters(24)),
    "Stripe test": _token("sk", "_test_", _characters(24)),
    "Stripe restricted": _token("rk", "_live_", _characters(24)),
    "Standard Webhooks": _token("wh", "sec_", _characters(32), "=="),
    "AWS access key": _token("AK", "IA", _characters(16, string.ascii_uppercase)),
    "AWS session key": _token("AS", "IA", _characters(16, string.ascii_uppercase)),
    "Google API key": _token("AI", "za", _characters(35)),
    "Google OAuth": _token("ya", "29.", _characters(60)),
    "Google client secret": _token("GOC", "SPX-", _characters(28)),
    "OpenAI": _token("sk", "-proj-", _characters(48)),
    "OpenAI legacy": _token("sk", "-", _characters(48)),
    "Anthropic": _token("sk", "-ant-api03-", _characters(80)),
    "Hugging Face": _token("h", "f_", _characters(34, string.ascii_letters)),
    "npm": _token("np", "m_", _characters(36)),
    "PyPI": _token("py", "pi-", "AgEIcHlwaS5vcmc", _characters(60)),
    "RubyGems": _token("ruby", "gems_", _characters(48, _HEX)),
    "Docker Hub": _token("dckr", "_pat_", _characters(27)),
    "SendGrid": _token("S", "G.", _characters(22), ".", _characters(43)),
    "Mailgun": _token("ke", "y-", _characters(32, _HEX)),
    "Twilio": _token("S", "K", _characters(32, _HEX)),
    "DigitalOcean": _token("dop", "_v1_", _characters(64, _HEX)),
    "Shopify": _token("shp", "at_", _characters(32, _HEX)),
    "Square": _token("sq0", "atp-", _characters(22)),
    "Databricks": _token("da", "pi", _characters(32, _HEX)),
    "Vault": _token("hv", "s.", _characters(90)),
    "Terraform Cloud": _token(_characters(14), ".atlas", "v1.", _characters(67)),
    "Grafana": _token("gl", "sa_", _characters(32), "_", _characters(8, _HEX)),
    "Sentry": _token("sntr", "ys_", _characters(60)),
    "Linear": _token("lin", "_api_", _characters(40)),
    "Notion": _token("nt", "n_", _characters(46)),
    "Figma": _token("fi", "gd_", _characters(40)),
    "PMAK": _token("PM", "AK-", _characters(24, _HEX), "-", _characters(34, _HEX)),
    "New Relic": _token("NR", "AK-", _characters(27, string.ascii_uppercase)),
    "Atlassian": _token("ATA", "TT3xFfGF0", _characters(60)),
    "Telegram": _token("1234567890", ":AA", _characters(33)),
    "Azure client secret": _token(_characters(3), "8", "Q~", _characters(34)),
    "age": _token("AGE-SEC", "RET-KEY-1", _characters(58, string.ascii_uppercase)),
    "JSON web token": _token("ey", "J", _characters(20), ".ey", "J", _characters(20), ".", _characters(43)),
    "holdfast": _token("h", "f_", "a1b2c3d4_", _characters(32)),
}

#: How a named secret is written.
NOTATIONS: Final = (
    f"DB_PASS={SECRET}",
    f"export MYSQL_PASS='{SECRET}'",
    f"PGPASSWORD={SECRET} psql -h db",
    f"REDISCLI_AUTH={SECRET}",
    f"password: {SECRET}",
    f"Password:{SECRET}",
    f"passwd={SECRET}",
    f"passphrase = {SECRET}",
    f"user_pass: {SECRET}",
    f"dbPassword={SECRET}",
    f"spring.datasource.password={SECRET}",
    f"clientSecret: '{SECRET}'",
    f"encryption_key={SECRET}",
    f"SIGNING_KEY: {SECRET}",
    f"secret-key => {SECRET}",
    f"AccountName=shop;AccountKey={SECRET};EndpointSuffix=core.windows.net",
    f"Endpoint=sb://shop/;SharedAccessKeyName=root;SharedAccessKey={SECRET}",
    f"https://shop.blob.core.windows.net/a?sv=2022&sig={SECRET}",
    f"https://bucket/x?X-Amz-Signature={SECRET}&X-Amz-Expires=60",
    f"GET /login?user=ada&password={SECRET}&next=/",
    f"user=ada&password%3D{SECRET}",
    f"Server=db;Uid=sa;Pwd={{{SECRET} ; with blanks}};Database=shop",
    f"host=db user=app password='{SECRET} with blanks' dbname=shop",
    f"<password>{SECRET}</password>",
    f"<ns:Password Type='text'>{SECRET}</ns:Password>",
    f"<db-password><![CDATA[{SECRET}]]></db-password>",
    f'<connection user="app" password="{SECRET}"/>',
    f'<add key="DbPassword" value="{SECRET}"/>',
    f'{{"password": "{SECRET}"}}',
    f'{{"name": "DB_PASSWORD", "value": "{SECRET}"}}',
    f'{{\\"password\\": \\"{SECRET} and more\\"}}',
    f'{{\\\\\\"password\\\\\\": \\\\\\"{SECRET} and more\\\\\\"}}',
    f"{{'password': {{'old': 'a', 'new': '{SECRET}'}}}}",
    f"password: |\n  first line\n  {SECRET}\nuser: ada",
    f"- name: DB_PASSWORD\n  value: {SECRET}",
    f"Login(user='ada', password=SecretText('a {SECRET}'))",
    f"{{'auths': {{'registry': {{'auth': '{SECRET}'}}}}}}",
    f"//registry.example.org/:_authToken={SECRET}",
    f"tool --password {SECRET} --verbose",
    f"tool --api-key '{SECRET} with blanks'",
    f"New-Login -Password {SECRET}",
    f"curl -u ada:{SECRET} https://host/",
    f"curl --user 'ada:{SECRET}' https://host/",
    f"sshpass -p {SECRET} ssh host",
    f"machine host login ada password {SECRET}",
    f"ALTER USER app IDENTIFIED BY '{SECRET}'",
    f"CREATE ROLE app LOGIN PASSWORD '{SECRET}'",
    f"Authorization: Bearer {SECRET}",
    f"Proxy-Authorization: Basic {SECRET}",
    f"Authorization: AWS4-HMAC-SHA256 Credential=x, Signature={SECRET}",
    f"X-Api-Key: {SECRET}",
    f"X-Auth-Token: {SECRET}",
    f"Ocp-Apim-Subscription-Key: {SECRET}",
    f"Cookie: theme=dark; session={SECRET}",
    f"Set-Cookie: theme=dark; sid={SECRET}; Path=/",
    f"JSESSIONID={SECRET}; Path=/",
    f"redis://:{SECRET}@cache:6379/0",
    f"redis+sentinel://a:26379,b:26379/jobs/0?sentinel_password={SECRET}",
    f"mongodb+srv://app:{SECRET}@cluster.example/shop",
    f"amqps://app:p@ss/{SECRET}@broker:5671/%2F",
    f"see http://a.example/x://app:{SECRET}@db",
    f"app:{SECRET}@tcp(127.0.0.1:3306)/shop",
    f"jdbc:oracle:thin:scott/{SECRET}@db.example:1521/shop",
    f"jdbc:sqlserver://db;user=sa;password={SECRET};",
    f"https://{SECRET}@o1.ingest.example/42",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----",
    f"-----BEGIN PGP PRIVATE KEY BLOCK-----\n\n{SECRET}\n-----END PGP PRIVATE KEY BLOCK-----",
    f"mnemonic: '{SECRET} tiger'",
    f"passcode={SECRET}",
)

INNOCENT: Final = (
    "42 tests passed: 40, failed: 2",
    "bypass=on, compass: north, passenger: Ada",
    "the pass: 3 of 4",
    "max_tokens=100, tokens: 7, tokenizer=bpe",
    "--tokens 5 --passive yes --keyboard de",
    "monkey=1 turkey: 2 keyword=blue primary_key=7 key=value foreign-key: x",
    "password_file=/run/password.txt and --password-file /run/password.txt",
    "HOLDFAST_LEDGER_FILE=/run/ledger",
    "author: Ada, authority=local, authored by Bob",
    "risk-management task-1 sk-short ask-a-question-about-something-else-here",
    "xoxo from the team, ghost_writer, glory-days",
    "whsec is a prefix",
    "SG. Meier, hvs. and ya29",
    "-u ada and --user ada",
    "<passenger>Ada</passenger><token-count>3</token-count>".replace("token-count", "tokens"),
    "please log in; the password is wrong",
    "'password' is required, 'user' is required",
    "commit 0a1b2c3d4e5f67890a1b2c3d4e5f67890a1b2c3d",
    "job 018f3c2e9a7b7c3d8e5f0a1b2c3d4e5f failed at 10:30:15",
    "https://host:8443/a?b=c#d user ada@example.org",
    "signal=SIGTERM sigma=2 sign: plus",
    "git@github.com:ada/shop.git",
    "design=a, resign: b, assignature",
    "sqlite:////tmp/a.db redis://cache:6379/0",
    "a basic understanding, a bearer of gifts",
    "SKU 12345, SKILL, AKIA, AIza",
    "laptop: 1, biotop=2, stop=3",
)


@pytest.mark.parametrize("token", TOKENS.values(), ids=TOKENS)
def test_a_token_is_known_by_its_form(token: str) -> None:
    redacted = redact(f"the call with {token}, failed")
    assert token[-12:] not in redacted
    assert MASK in redacted
    assert redacted.startswith("the call with ")
    assert redacted.endswith(" failed")


@pytest.mark.parametrize("text", NOTATIONS, ids=range(len(NOTATIONS)))
def test_a_named_secret_is_masked_in_every_notation(text: str) -> None:
    redacted = redact(f"before {text} after")
    assert SECRET not in redacted
    assert MASK in redacted
    assert redacted.startswith("before ")
    assert SECRET not in str(redact_value({"message": text}))


@pytest.mark.parametrize("text", INNOCENT, ids=range(len(INNOCENT)))
def test_text_that_only_looks_like_a_secret_is_kept(text: str) -> None:
    assert redact(text) == text


def test_a_masked_text_stays_as_it_is() -> None:
    masked = [redact(text) for text in (*NOTATIONS, *TOKENS.values())]
    assert [redact(text) for text in masked] == masked


#: Texts that repeat the beginning of a pattern and never complete it.
HOSTILE: Final = (
    *("a", "a://b:", "a://b:c@", "://", "http://a", "password=", "password='", 'password="\\', "password: |\n  "),
    *("-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----", "eyJ", "-eyJ", "eyJaaaaaaaa.", "\\", "secret_"),
    *("<password", "<password ", "<password>", "<a", "<![CDATA[", "<password><![CDATA[]", "password\\\\\\\\"),
    *("--password ", "--", "-p ", "-u a", "-u a:", "login a ", "identified by '", "jdbc:oracle:thin:a/", "a:b@tcp"),
    *(
        "bearer ",
        "basic a",
        "Authorization",
        "cookie:",
        "hf_",
        "hf_a_",
        "sk-",
        "xoxb-",
        "SG.",
        "SG.a",
        "a.atlas",
        "1:AA",
    ),
    *("8Q~", "name: password value", "_pass", "pass=", "token token", "key-", "AIza", "whsec_", "a1b2", " \t"),
)


def _seconds(work: Callable[[], object]) -> float:
    """The least of two, so that other processes do not disturb it."""

    def measure() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return min(measure() for _ in range(2))


@pytest.mark.parametrize("piece", HOSTILE, ids=range(len(HOSTILE)))
def test_time_grows_no_faster_than_the_text(piece: str) -> None:
    def text(size: int) -> str:
        return piece * (size // len(piece))

    short, long = text(2_000), text(16_000)
    # Eight times the text; quadratic work would take 64 times as long.
    assert _seconds(lambda: redact(long)) < 24 * _seconds(lambda: redact(short)) + 0.01


def test_a_megabyte_of_every_hostile_piece_is_redacted() -> None:
    pieces = "".join(HOSTILE)
    text = f"{pieces * (1_000_000 // len(pieces))} password={SECRET}"
    assert SECRET not in redact(text)
