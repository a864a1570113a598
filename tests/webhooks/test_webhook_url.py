"""Which addresses a webhook may have."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from holdfast.core.webhook_url import AllowList, check_address, check_target, is_public
from holdfast.errors import InvalidOption

EMPTY = AllowList()

PRIVATE = [
    "127.0.0.1", "127.255.255.254", "10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "0.0.0.0", "0.1.2.3",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "198.51.100.7",
    "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.88.99.1",
    "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "fec0::1", "ff02::1",
    "2001:db8::1", "2002:7f00:1::", "2002:808:808::", "2001:0:7f00:1::", "100::1", "5f00::1",
]  # fmt: skip
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("text", PRIVATE)
def test_addresses_that_are_not_public(text: str) -> None:
    assert not is_public(ip_address(text))
    with pytest.raises(InvalidOption, match="public internet"):
        check_address("example.org", ip_address(text), EMPTY)


@pytest.mark.parametrize("text", PUBLIC)
def test_addresses_that_are_public(text: str) -> None:
    assert is_public(ip_address(text))
    check_address("example.org", ip_address(text), EMPTY)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/hook", "http://127.0.0.1:8080/", "http://[::1]/", "http://[::ffff:127.0.0.1]/",
        "http://[fd00::1]:8080/x", "https://169.254.169.254/latest/meta-data", "http://0.0.0.0/",
        # Other spellings of the same addresses.
        "http://127.1/", "http://2130706433/", "http://0x7f000001/", "http://0177.0.0.1/", "http://0x7f.1/",
        "http://127.0.0.1./", "http://127.0.0.256/",
    ],
)  # fmt: skip
def test_literal_addresses_are_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidOption, match="webhook"):
        check_target(url, EMPTY)


@pytest.mark.parametrize(
    "url",
    [
        None, 5, "", "example.org/hook", "ftp://example.org/", "file:///etc/passwd", "gopher://example.org/", "https://",
        "https:///path", "javascript:alert(1)", "//example.org/", "https://exa mple.org/", "https://example.org:0/",
        "https://example.org:99999/", "https://example.org:/", "https://example.org:abc/", "https://[::1/", "https://[x]/",
        "https://user@example.org/", "https://user:p4ssw0rd@example.org/", "https://:@example.org/",
        "https://example.org/\r\nX-Evil: 1", "https://example.org/\tx", "https://example.org\\@127.0.0.1/",
        "https://exämple.org/", "https://example.org/ä", "https://-example.org/", "https://ex..ample.org/",
        "https://" + "a" * 64 + ".org/", "https://example.org/" + "a" * 1000, "*",
    ],
)  # fmt: skip
def test_invalid_addresses_are_refused(url: object) -> None:
    with pytest.raises(InvalidOption, match="webhook") as caught:
        check_target(url, EMPTY)
    assert "p4ssw0rd" not in str(caught.value)


def test_a_valid_address_and_its_redacted_form() -> None:
    target = check_target("https://Hooks.Example.org.:8443/a/b?token=s3cret#part", EMPTY)
    assert (target.host, target.port, target.path) == ("hooks.example.org", 8443, "/a/b?token=s3cret")
    assert target.redacted == "https://hooks.example.org:8443"
    assert check_target("http://8.8.8.8", EMPTY).path == "/"
    assert check_target("http://example.org#@127.0.0.1:80/", EMPTY).host == "example.org"
    assert check_target("http://[2606:4700::1111]:80/", EMPTY).redacted == "http://[2606:4700::1111]"


def test_exceptions_allow_what_they_name_and_no_more() -> None:
    allowed = AllowList.parse(["10.0.0.0/8", "127.0.0.1", "::1", "hooks.internal"])
    check_target("http://10.200.1.1/", allowed)
    check_target("http://127.0.0.1:9/", allowed)
    check_target("http://[::ffff:10.0.0.1]/", allowed)
    check_target("http://[::1]/", allowed)
    check_address("hooks.internal", ip_address("192.168.1.1"), allowed)
    for url in ("http://127.0.0.2/", "http://192.168.1.1/", "http://169.254.169.254/"):
        with pytest.raises(InvalidOption):
            check_target(url, allowed)
    with pytest.raises(InvalidOption):
        check_address("evil.hooks.internal", ip_address("192.168.1.1"), allowed)


@pytest.mark.parametrize("entry", ["10.0.0.0/99", "http://x/", "a b", "", "127.1"])
def test_invalid_exceptions_are_refused(entry: str) -> None:
    with pytest.raises(InvalidOption):
        AllowList.parse([entry])
