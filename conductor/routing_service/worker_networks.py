"""The networks to which the routing service sends requests: any registration of a worker names a URL for it.

Without bounds that would let strangers into every network the router reaches, and to a cloud machine's metadata at a
link-local address. So a URL is a scheme, a host and a port and nothing else, and its host must be in one of the
configured networks. A name is resolved for each request, and the request goes to exactly the address that was checked:
a name that resolves elsewhere a moment later gains nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress

import httpx

from tanghulu.errors import ConfigError, InvalidRequest, NodeUnavailable
from tanghulu.rpc.sockets import look_up
from tanghulu.types import parse_url

#: This machine, and addresses private to an organisation (RFC 1918, RFC 4193).
PRIVATE = "127.0.0.0/8,10.0.0.0/8,172.16.0.0/12,192.168.0.0/16,::1/128,fc00::/7"


class WorkerNetworks:
    """The networks in ``text``, separated by commas. Raises ConfigError for an invalid network.

    If they are ``encrypted``, workers use HTTPS only.
    """

    def __init__(self, text: str = PRIVATE, *, encrypted: bool = False) -> None:
        self._text, self._encrypted = text, encrypted
        try:
            self._networks = [ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip()]
        except ValueError as error:
            raise ConfigError(f"--worker-networks: {error}") from None

    def checked_url(self, url: str) -> str:
        """Return ``url`` without a trailing slash. Raises InvalidRequest for plain HTTP, or a host outside them."""
        read = parse_url(url)
        if self._encrypted and not read.startswith("https:"):
            raise InvalidRequest(f"url {url!r} is plain HTTP, but this router uses TLS; give an https:// URL")
        with contextlib.suppress(ValueError):  # of a name
            if not self._holds(ipaddress.ip_address(httpx.URL(read).host)):
                raise InvalidRequest(f"url {url!r} is outside the workers' networks, {self._text} (--worker-networks)")
        return read

    async def addresses_of(self, host: str) -> list[str]:
        """Return the addresses of ``host`` in these networks. Raises NodeUnavailable if it has none there."""
        found = await look_up(host)
        inside = [each for each in found if self._holds(ipaddress.ip_address(each))]
        if not inside:
            raise NodeUnavailable(f"{host} is at {', '.join(found)}, outside --worker-networks {self._text}")
        return inside

    def _holds(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        mapped = getattr(address, "ipv4_mapped", None)
        return any((mapped or address) in network for network in self._networks)
