"""Parsing and printing of the small shared values."""

import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.types import (
    Address,
    BlockHash,
    Fingerprint,
    Place,
    format_size,
    kv_chunk_key,
    parse_kv_chunk_key,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("64MiB", 64 << 20), ("1.5 GiB", 3 << 29), ("4kB", 4000), ("2g", 2 * 10**9), ("1TiB", 1 << 40)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "1.2.3", "-4", "4 parsecs", "1KiBi", "9" * 400])
def test_bad_sizes_name_themselves(text):
    with pytest.raises(InvalidRequest, match="size"):
        parse_size(text)


def test_sizes_for_people():
    assert [format_size(n) for n in (5, 2048, 3 << 29, 1 << 45)] == ["5 B", "2.0 KiB", "1.5 GiB", "32.0 TiB"]


@pytest.mark.parametrize("text", ["127.0.0.1:7400", "[::1]:80", "host.name:1"])
def test_addresses_round_trip(text):
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["7400", ":7400", "host:", "host:port", "host:\u00b2", "host:-1"])
def test_bad_addresses(text):
    with pytest.raises(InvalidRequest, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize(
    "text", ["h:70000", "[::1:1", "::1]:1", "a..b:1", "x" * 64 + ":1", "me@h:1", "h/p:1", "h p:1", "h:1;h:2"]
)
def test_hosts_and_ports_that_cannot_be(text):
    with pytest.raises(InvalidRequest, match=r"is not a (host|port)"):
        Address.parse(text)


def test_places():
    assert str(Place.parse("z1/r2/h3")) == "z1/r2/h3"
    with pytest.raises(InvalidRequest, match="zone/rack/host"):
        Place.parse("z1/r2")


def test_kv_chunk_keys_round_trip():
    key = kv_chunk_key(Fingerprint(bytes(range(16))), BlockHash(bytes(range(16, 32))), 3)
    assert parse_kv_chunk_key(key) == ("0001020304050607", bytes(range(16, 32)), 3)
    of_vllm = kv_chunk_key(Fingerprint(bytes(16)), BlockHash(bytes(range(32))))
    assert parse_kv_chunk_key(of_vllm) == ("0" * 16, bytes(range(32)), 0)
    for other in ("user/key", "kv/a/b/c", "kv/00/" + "zz" * 16 + "/0"):
        assert parse_kv_chunk_key(other) is None
