"""How secrets are written: names of secret values, the notations around them, and tokens with a known form.

`observe.redact` applies these tables. A name identifies a secret in every notation; a token identifies itself by its
prefix, as its vendor documents it (the source is named in each row). The notations are those of the POSIX shell, JSON,
YAML, XML, URLs (RFC 3986), HTTP headers (RFC 9110), netrc, SQL, libpq, JDBC, ODBC and Go's MySQL driver.

Every pattern takes time linear in the length of the text. A pattern may therefore neither fail after an unbounded
repetition that can start at every character, nor repeat a repetition over the same characters: unbounded repetitions
are at the end, are followed only by optional parts, or start at most once per word.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

#: A name ends here or continues after `_` or `-`: `secret_access_key` matches, `max_tokens` does not.
NAMES: Final = (
    *("password", "passwd", "passphrase", "passcode", "pwd", "secret", "token", "credentials?", "cookie", "signature"),
    # `pass` alone is a word: it counts after `_` or `-`, in `dbPass`, in quotes and before `=`.
    *(
        r"(?<=[a-z0-9][_-])pass",
        r"(?-i:(?<=[a-z])Pass)",
        r"(?<![\w-])pass(?=\\{0,8}[\"']|\s?=)",
        r"(?<=[a-z0-9][_-])pw",
    ),
    # Keys that lock something; `primary_key` and `key` do not.
    r"(?:api|access|private|secret|encryption|signing|ssh|auth|master|account|subscription|shared|app|hmac)[_-]?key",
    # Redis' command line; npm; shared access signatures of Azure; sessions of web frameworks.
    *("rediscli_auth", r"(?<!\w)_auth", r"(?<=[?&;])sig", "(?:php|j)?sess(?:ion)?id", r"connect\.sid"),
    *("mnemonic", "seed[_-]?phrase"),
)
#: A text without any of these is not searched for `NAMES`: a substring search is 100 times faster.
STEMS: Final = (
    *("pass", "pwd", "_pw", "-pw", "secret", "token", "credential", "cookie", "signature", "key", "_auth", "sig="),
    *("sessid", "sessionid", "connect.sid", "mnemonic", "phrase"),
)

#: What may follow a name: `_old`, but not `_file`, whose value is a path.
_SUFFIX: Final = r"(?:[_-](?!(?:file|path)\b)[\w-]{0,40})?"
#: `=`, `:`, `=>`, also after the closing quote of the name and percent-encoded; or `value=` in the next attribute.
_JOINT: Final = (
    r"(?:\\{0,8}[\"']?\]?\s{0,3}(?:=>|[:=](?!>)|%3[AD])|[\"']?,?\s{1,20}[\"']?value[\"']?\s{0,3}[:=])\s{0,3}"
)
#: Not a mask: a text that was masked before stays as it is.
_UNMASKED: Final = r"(?!\*\*\*(?![\w*]))"
_QUOTED: Final = r"\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?"
_VALUE: Final = (
    # Quoted, including escapes; quoted inside a quoted text; an indented block of YAML.
    rf"(?:[bru]?(?:{_QUOTED})|\\{{1,8}}\"[^\"]*\"?|\\{{1,8}}'[^']*'?|[|>][+-]?[ \t]*(?:\r?\n[ \t]+[^\r\n]*)+"
    # In braces, brackets or a call; otherwise up to the next blank or parameter.
    r"|\{[^}]*\}?|\[[^\]]*\]?|[A-Za-z_][\w.]{0,40}\([^)\n]*\)?|[^\s&]+)"
)


def named_values(names: list[str]) -> tuple[re.Pattern[str], ...]:
    """Patterns for the values of these names; the group `name` is what stays."""
    name = rf"(?:{'|'.join(names)}){_SUFFIX}"
    return (
        re.compile(rf"(?P<name>{name}{_JOINT}){_UNMASKED}{_VALUE}", re.IGNORECASE),
        # An element of XML.
        re.compile(
            rf"(?P<name><[\w:.-]{{0,40}}?{name}(?:\s[^<>]{{0,300}})?(?<!/)>){_UNMASKED}"
            r"(?:<!\[CDATA\[(?:[^\]]|\](?!\]>))*(?:\]\]>)?|[^<]+)",
            re.IGNORECASE,
        ),
        # An option of a command.
        re.compile(
            rf"(?P<name>(?<![\w-])-{{1,2}}[\w-]{{0,40}}?{name}[ \t]{{1,3}})(?!-){_UNMASKED}(?:{_QUOTED}|\S+)",
            re.IGNORECASE,
        ),
    )


def secret_name(names: list[str]) -> re.Pattern[str]:
    """Pattern for a key of a mapping whose value is a secret."""
    return re.compile(rf"(?:{'|'.join([*names, '^pass', 'authorization'])}){_SUFFIX}$", re.IGNORECASE)


class Phrase(NamedTuple):
    """A notation in which something besides a name identifies the secret."""

    #: In lower case; a text without it is not searched.
    stem: str
    #: The group `name` is what stays.
    pattern: re.Pattern[str]


def _phrase(stem: str, pattern: str) -> Phrase:
    return Phrase(stem, re.compile(pattern, re.IGNORECASE))


PHRASES: Final = (
    # To the end of the line: digest credentials and cookies have several parts.
    _phrase("authorization", r"(?P<name>authorization\\{0,8}[\"']?\s{0,3}[:=,]\s{0,3})[^\r\n]+"),
    _phrase("cookie", r"(?P<name>cookie:[ \t]{0,3})(?![\"'\\])[^\r\n]+"),
    _phrase("bearer", r"(?P<name>\bbearer\s{1,3})(?=[^\s]*[\d=._-])[A-Za-z0-9._~+/=-]{8,}"),
    _phrase("basic", r"(?P<name>\bbasic\s{1,3})(?=[^\s]*[\d=._-])[A-Za-z0-9._~+/=-]{8,}"),
    # Credentials of a container registry.
    _phrase("auth", r"(?P<name>(?<!\w)auth\\{0,8}[\"']\s{0,3}:\s{0,3}\\{0,8}[\"'])[A-Za-z0-9+/=_-]{8,}"),
    # curl; numbers are a user and a group.
    _phrase("-u", r"(?P<name>(?<!\S)(?:-u|--user)[ =]{1,3}[\"']?[^\s:\"']{1,200}:)(?!//|\d+(?!\w))[^\s\"']+"),
    _phrase("sshpass", rf"(?P<name>\bsshpass\s{{1,3}}-p\s{{0,3}}){_UNMASKED}(?:{_QUOTED}|\S+)"),
    _phrase("login", r"(?P<name>\blogin\s{1,3}\S{1,200}\s{1,3}password\s{1,3})\S+"),
    _phrase("identified", r"(?P<name>\bidentified\s{1,3}by\s{1,3})'(?:[^'\\]|\\.)*'?"),
    _phrase("password", r"(?P<name>\bpassword\s{1,3})'(?:[^'\\]|\\.)*'?"),
    # Go's MySQL driver and Oracle's JDBC driver write credentials without `//`. Each starts once per word.
    _phrase("@tcp(", r"(?P<name>(?<!\S)[^\s:]{1,200}:)\S*(?=@tcp\()"),
    _phrase("@unix(", r"(?P<name>(?<!\S)[^\s:]{1,200}:)\S*(?=@unix\()"),
    _phrase("jdbc:oracle:", r"(?P<name>(?<!\S)(?>\S*?jdbc:oracle:)[a-z]{1,10}:[^\s/@]{0,200}/)\S+(?=@)"),
)


class TokenForm(NamedTuple):
    """A token that is known by its form."""

    #: Parts of which the token has one; a text without them is not searched.
    stems: tuple[str, ...]
    pattern: re.Pattern[str]
    #: Where the vendor documents the form.
    source: str


def _token(stems: str, pattern: str, source: str) -> TokenForm:
    # Not inside a word, where the same characters are part of something else.
    return TokenForm(tuple(stems.split()), re.compile(rf"(?<![A-Za-z0-9]){pattern}"), source)


_AWS: Final = "AKIA ASIA AGPA AIDA AROA ANPA ANVA"

TOKENS: Final = (
    _token(_AWS, rf"(?:{_AWS.replace(' ', '|')})[0-9A-Z]{{16}}\b", "docs.aws.amazon.com, IAM identifiers"),
    # Does not start inside a word: each such start would be scanned to the end of the word.
    _token("eyJ", r"(?<![_-])eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", "RFC 7519"),
    _token("gho_ ghp_ ghr_ ghs_ ghu_", r"gh[oprsu]_[A-Za-z0-9]{30,}", "docs.github.com, token formats"),
    _token("github_pat_", r"github_pat_\w{30,}", "docs.github.com, token formats"),
    _token(
        "glpat- gldt- glrt- glcbt- glptt- glft- glimt- glagent- glsoat- glffct- gloas-",
        r"gl(?:pat|dt|rt|cbt|ptt|ft|imt|agent|soat|ffct|oas)-[\w-]{20,}",
        "docs.gitlab.com, token overview",
    ),
    _token("xox", r"xox[a-z][.-][A-Za-z0-9.-]{10,}", "docs.slack.dev, token types"),
    _token("xapp-", r"xapp-[A-Za-z0-9-]{10,}", "docs.slack.dev, token types"),
    _token("hooks.slack.com", r"hooks\.slack\.com/(?:services|workflows|triggers)/[\w/]{20,}", "docs.slack.dev"),
    _token("/api/webhooks/", r"discord(?:app)?\.com/api/webhooks/\d{1,20}/[\w-]{20,}", "discord.com/developers"),
    _token("_live_ _test_", r"[rs]k_(?:live|test)_[A-Za-z0-9]{10,}", "docs.stripe.com/keys"),
    _token("whsec_", r"whsec_[A-Za-z0-9+/=_-]{10,}", "standardwebhooks.com; docs.stripe.com/webhooks"),
    _token("AIza", r"AIza[\w-]{35}", "cloud.google.com, API keys"),
    _token("ya29.", r"ya29\.[\w-]{20,}", "developers.google.com/identity, OAuth 2.0"),
    _token("GOCSPX-", r"GOCSPX-[\w-]{20,}", "developers.google.com/identity, OAuth 2.0"),
    # A slug has no digits. The look-ahead reads to the end of the word, so it starts once per word.
    _token("sk-", r"(?<![_-])sk-(?=[A-Za-z_-]*\d)[\w-]{32,}", "platform.openai.com; docs.anthropic.com"),
    _token("hf_", r"hf_[A-Za-z]{34}\b", "huggingface.co/docs, access tokens"),
    _token("npm_", r"npm_[A-Za-z0-9]{36}", "documentation of npm, access tokens"),
    _token("pypi-", r"pypi-[\w-]{50,}", "help pages of PyPI, API tokens"),
    _token("rubygems_", r"rubygems_[0-9a-f]{48}", "guides of RubyGems, API keys"),
    _token("dckr_", r"dckr_(?:pat|oat)_[\w-]{20,}", "docs.docker.com, access tokens"),
    _token("SG.", r"SG\.[\w-]{22}\.[\w-]{43}", "twilio.com/docs/sendgrid, API keys"),
    _token("key-", r"key-[0-9a-f]{32}\b", "documentation.mailgun.com, API keys"),
    _token("SK", r"SK[0-9a-f]{32}\b", "twilio.com/docs, API keys"),
    _token("_v1_", r"do[opr]_v1_[0-9a-f]{64}", "docs.digitalocean.com, API tokens"),
    _token("shp", r"shp(?:at|ca|pa|ss)_[0-9A-Fa-f]{32}", "shopify.dev, access tokens"),
    _token("sq0", r"sq0[a-z]{3}-[\w-]{22,}", "developer.squareup.com, access tokens"),
    _token("dapi", r"dapi[0-9a-f]{32}", "docs.databricks.com, access tokens"),
    _token("hvs. hvb. hvr.", r"hv[sbr]\.[\w-]{20,}", "developer.hashicorp.com/vault, tokens"),
    _token(".atlasv1.", r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{60,}", "developer.hashicorp.com/terraform, API tokens"),
    _token("glsa_ glc_", r"(?:glsa|glc)_[\w+/=-]{20,}", "grafana.com/docs, service accounts"),
    _token("sntry", r"sntry[su]_[\w+/=-]{20,}", "docs.sentry.io, auth tokens"),
    _token("lin_api_", r"lin_api_\w{20,}", "linear.app/developers"),
    _token("ntn_", r"ntn_[A-Za-z0-9]{20,}", "developers.notion.com, authorization"),
    _token("figd_", r"figd_[\w-]{20,}", "developers.figma.com, access tokens"),
    _token("PMAK-", r"PMAK-[0-9a-f]{24}-[0-9a-f]{34}", "API keys of the PMAK- form, as its vendor documents them"),
    _token("NRAK-", r"NRAK-[0-9A-Z]{27}", "docs.newrelic.com, API keys"),
    _token("ATATT3", r"ATATT3[\w=-]{20,}", "support.atlassian.com, API tokens"),
    _token(":AA", r"\d{8,10}:AA[\w-]{33}", "core.telegram.org/bots"),
    _token("Q~", r"[\w~.-]{3}\dQ~[\w~.-]{31,34}", "learn.microsoft.com, application credentials"),
    _token("AGE-SECRET-KEY-", r"AGE-SECRET-KEY-1[0-9A-Z]{58}", "age-encryption.org"),
)

#: Stem and pattern of every token, flat: redaction of an ordinary text is little more than these substring searches.
TOKEN_STEMS: Final = tuple((stem, form.pattern) for form in TOKENS for stem in form.stems)

#: Armour of PEM (RFC 7468), of OpenSSH and of OpenPGP (RFC 9580).
_ARMOUR: Final = r"[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
PRIVATE_KEY: Final = re.compile(rf"-----BEGIN {_ARMOUR}.*?(?:-----END {_ARMOUR}|\Z)", re.DOTALL)
#: End of a private key in a text that was truncated inside it.
REST_OF_KEY: Final = re.compile(rf"\A.*-----END {_ARMOUR}", re.DOTALL)

#: The rest of a word that contains a URL.
URL_REST: Final = re.compile(r"://\S+")
URL_USER: Final = re.compile(r"://[^\s:@/]{0,200}:")
#: In a web URL, a user name without a password is usually an API key.
WEB_KEY: Final = re.compile(r"(?P<name>\bhttps?://)[^\s:@/?#]+(?=@)", re.IGNORECASE)
OWN_TOKEN: Final = re.compile(r"\b(?P<name>hf_[0-9A-Za-z]{1,64}_)[0-9A-Za-z_-]{4,}")
