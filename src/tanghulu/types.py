"""Types that every component shares: ids, hashes and small value classes.

Owns no behaviour beyond parsing and printing. Does not depend on sockets, protobuf or torch.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from tanghulu.errors import InvalidRequest

#: Identity of one process of the cluster (``node-7410-3f2a``); never reused by a later process.
InstanceId = NewType("InstanceId", str)
#: Identity of a client's inference request inside the cluster.
RequestId = NewType("RequestId", str)
#: 16 bytes: the chained hash of a block and of all preceding blocks.
BlockHash = NewType("BlockHash", bytes)
#: 16 bytes: identifies interchangeable KV caches (weights, dtype, layout, rotary settings, LoRA).
Fingerprint = NewType("Fingerprint", bytes)
#: Key of a chunk in the store, UTF-8 of at most ``MAX_KEY_BYTES``.
ChunkKey = NewType("ChunkKey", str)
#: Number of an access right to a range of a segment (a reservation or a pin); 0 is never issued.
LeaseId = NewType("LeaseId", int)

MAX_KEY_BYTES = 1024
#: Of a value anywhere; a node's own limit is ``--max-value`` and the room that it has.
MAX_VALUE_BYTES = 1 << 40


class Role(Enum):
    """The role of an instance; the value is the ``component`` under which it registers."""

    MASTER = "master"
    NODE = "node"
    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "worker"
    CONDUCTOR = "conductor"
    ROUTER = "router"
    GATEWAY = "gateway"

    @property
    def prefills(self) -> bool:
        """Whether requests may be sent here for prefill."""
        return self in (Role.PREFILL, Role.BOTH)

    @property
    def decodes(self) -> bool:
        """Whether requests may be sent here for decode."""
        return self in (Role.DECODE, Role.BOTH)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a process: ``zone/rack/host``. Equal hosts share memory; equal racks are near."""

    zone: str = "local"
    rack: str = "local"
    host: str = "local"

    @classmethod
    def here(cls) -> Place:
        """Return the default place of a process: this machine, in an unnamed zone and rack."""
        return cls(host=socket.gethostname().replace("/", "-") or "local")

    @classmethod
    def parse(cls, text: str) -> Place:
        """Parse ``zone/rack/host``; raises InvalidRequest unless it has exactly three non-empty parts."""
        parts = text.split("/")
        if len(parts) != 3 or not all(parts):
            raise InvalidRequest(f"place {text!r} is not of the form zone/rack/host")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.zone}/{self.rack}/{self.host}"


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address, printed and parsed as ``host:port``."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse ``host:port``; raises InvalidRequest with the invalid text."""
        host, separator, port = text.rpartition(":")
        if not separator or not host or not re.fullmatch("[0-9]{1,5}", port):
            raise InvalidRequest(f"address {text[:200]!r} is not of the form host:port")
        if int(port) > 65535:
            raise InvalidRequest(f"address {text[:200]!r}: {port} is not a port; the highest is 65535")
        if host.startswith("[") and host.endswith("]") and ":" in host:
            host = host[1:-1]
        return cls(check_host(host), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def printable(text: str) -> str:
    """Return ``text`` for a terminal: control characters, line ends and the like escaped, so that it is one line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def check_host(host: str) -> str:
    """Return ``host``, which is an IP address or can be a name. Raises InvalidRequest stating why it can be neither."""
    try:
        ipaddress.ip_address(host)
        return host
    except ValueError:
        pass
    if not host:
        raise InvalidRequest("the host is empty; use 0.0.0.0 for all addresses of this machine")
    odd = re.search(r"[^\w.-]", host)
    if odd:
        raise InvalidRequest(f"{host[:200]!r} is not a host: {odd[0]!r} is not allowed in a name or an IPv4 address")
    try:
        host.encode("idna")
    except UnicodeError:
        raise InvalidRequest(f"{host[:200]!r} is not a host: each part of a name has 1 to 63 characters") from None
    return host


def parse_url(text: str, *, path: bool = False) -> str:
    """Return the URL of an HTTP server, without a trailing slash; a path may follow only if ``path`` is true.

    Raises InvalidRequest stating what is wrong.
    """
    scheme, separator, rest = text.partition("://")
    shown = f"url {text[:200]!r}"
    if not separator or scheme.lower() not in ("http", "https"):
        raise InvalidRequest(f"{shown} must begin with http:// or https://")
    where, _, below = rest.rstrip("/").partition("/")
    if re.search(r"[?#@\s]", rest) or (below and not path):
        raise InvalidRequest(f"{shown} must have only a host and a port: no path, query or user")
    is_bare = where.endswith("]") or ":" not in where
    try:
        if not where:
            raise InvalidRequest("it has no host")
        address = Address.parse(f"{where}:80" if is_bare else where)
    except InvalidRequest as error:
        raise InvalidRequest(f"{shown}: {error.message}") from None
    base = f"{scheme.lower()}://{str(address).removesuffix(':80') if is_bare else address}"
    return f"{base}/{below}" if below else base


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, or nothing: unknown
        return False


_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)
#: The largest size that can be requested.
MAX_SIZE_BYTES = 1 << 60
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str | int) -> int:
    """Parse ``"64MiB"``, ``"1.5 GiB"``, ``"4kB"`` (1000) or ``"512"`` into bytes; raises InvalidRequest."""
    if type(text) is int and text >= 0:
        return text
    match = _SIZE.match(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidRequest(f"size {text!r} is not a number with a unit such as 512MiB or 2GB")
    number, prefix, binary = match.groups()
    base = 1024 if binary else 1000
    size_bytes = float(number) * base ** _POWERS[prefix.lower()]
    if size_bytes > MAX_SIZE_BYTES:
        raise InvalidRequest(f"size {str(text)[:80]!r} is beyond {format_size(MAX_SIZE_BYTES)}")
    return int(size_bytes)


def format_size(size_bytes: float) -> str:
    """Format ``size_bytes`` for people, in binary units: ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


#: Number of hexadecimal digits of a block's name in a key: names of 128 bits, and vLLM's of 256.
_HASH_DIGITS = (32, 64)


def kv_chunk_key(fingerprint: Fingerprint, block_hash: BlockHash, part: int = 0) -> ChunkKey:
    """Return the key of the chunk that holds one block's KV: ``kv/<fingerprint>/<block hash>/<part>``.

    ``part`` is the tensor-parallel rank. The fingerprint is in the key for people and for ``remove_matching``; it is
    also the seed of the hash chain, so the hash alone is already unambiguous.
    """
    return ChunkKey(f"kv/{fingerprint[:8].hex()}/{block_hash.hex()}/{part}")


def parse_kv_chunk_key(key: str) -> tuple[str, BlockHash, int] | None:
    """Parse a ``kv_chunk_key``: (fingerprint's first 8 bytes in hex, block hash, part), or None for other keys."""
    parts = key.split("/")
    if len(parts) != 4 or parts[0] != "kv" or len(parts[2]) not in _HASH_DIGITS:
        return None
    try:
        return parts[1], BlockHash(bytes.fromhex(parts[2])), int(parts[3])
    except ValueError:
        return None
