"""Names that connections ask for, read from bytes of strangers; and rules for ranges and domains."""

import ssl

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox import egress, network
from perilune.sandbox.catalogue import Network
from perilune.sandbox.errors import InvalidRequest


def _hello(name: str) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def test_the_server_name_of_a_real_handshake() -> None:
    hello = _hello("files.example.org")
    assert egress.tls_complete(hello) and not egress.tls_complete(hello[:-1])
    assert egress.server_name(hello) == "files.example.org"


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_has_no_name(data: bytes) -> None:
    egress.server_name(data)
    egress.host(data)


HELLO = _hello("a.example")


@settings(deadline=None)
@given(st.data())
def test_a_damaged_handshake_never_crashes(data: st.DataObject) -> None:
    hello = bytearray(HELLO)
    for _ in range(data.draw(st.integers(1, 5))):
        hello[data.draw(st.integers(0, len(hello) - 1))] = data.draw(st.integers(0, 255))
    egress.server_name(bytes(hello[: data.draw(st.integers(0, len(hello)))]))


def test_one_host_header_or_none() -> None:
    assert egress.host(b"GET / HTTP/1.1\r\nHost: A.example:80\r\n\r\n") == "a.example"
    assert egress.host(b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n") is None


def test_what_may_pass() -> None:
    slot = network.Slot(1, "/x", Network(False, ["*.example.org", "files.example.net", "93.184.0.0/16"]))
    assert slot.permits("cdn.example.org", "93.184.216.34") == "cdn.example.org"
    assert slot.permits("files.example.net", "1.2.3.4") == "files.example.net"
    assert slot.permits("example.org", "1.2.3.4") is None
    assert slot.permits("evilexample.org", "1.2.3.4") is None
    slot.network = Network(True, ["files.example.net"], ["8.8.8.0/24"])
    assert slot.permits("other.net", "1.2.3.4") == "1.2.3.4"
    assert slot.permits("other.net", "8.8.8.8") is None
    assert slot.permits("other.net", "10.0.0.1") is None


def test_malformed_lists_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="domains cannot be denied"):
        network.check(Network(deny=["example.org"]))
    with pytest.raises(InvalidRequest, match="neither"):
        network.check(Network(allow=["10.0.0.0/8; flush ruleset"]))


@settings(deadline=None)
@given(st.text(max_size=30))
def test_nothing_unchecked_reaches_the_rules(entry: str) -> None:
    try:
        network.check(Network(True, [entry]))
    except InvalidRequest:
        return
    text = network.rules(Network(True, [entry]))
    assert text.count("{") == text.count("}") and ";" not in entry and "\n" not in entry.strip("\n")
