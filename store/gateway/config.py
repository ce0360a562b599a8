"""The options of ``tanghulu store serve``, checked. Imports no HTTP framework: the command line does."""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.errors import ConfigError
from tanghulu.runtime.config import check_bounds, option
from tanghulu.runtime.master_options import MasterOptions, ServerOptions
from tanghulu.runtime.process import ProcessConfig
from tanghulu.types import is_loopback


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(MasterOptions, ServerOptions, ProcessConfig):
    """The gateway's address, its conditions for callers, and its bounds."""

    port: int = option(7480, "port of the HTTP API; 0 picks one")
    grpc_port: int = option(-1, "port of values and keys over gRPC; 0 picks one, -1 disables it", least=-1)
    require_token: bool = option(False, "reject requests without a token instead of using the gateway's own")
    insecure: bool = option(False, "allow an address beyond loopback without TLS, or open to everybody")
    deadline_s: float = option(10.0, "deadline of one store call, in seconds", above=0)
    request_s: float = option(
        300.0, "deadline of a request of many calls (checks, removals by pattern), in seconds", above=0
    )
    stall_s: float = option(
        30.0, "seconds after which a client that neither sends nor receives is disconnected", above=0
    )
    max_value: int = option(4 << 30, "largest accepted value, within the memory of a node", size=True, least=1)
    max_in_flight_bytes: int = option(8 << 30, "limit on bytes of values in flight", size=True, least=1)
    max_requests: int = option(256, "limit on requests in flight", least=1)
    max_streams: int = option(64, "limit on followers of /v1/events", least=1)
    max_connections: int = option(1024, "limit on connections", least=1)
    max_clients: int = option(64, "limit on tokens kept connected", least=2)
    idle_s: float = option(300.0, "seconds after which an unused token is forgotten", above=0)
    grace_s: float = option(10.0, "seconds for which open requests may continue at shutdown", above=0)

    def __post_init__(self) -> None:
        check_bounds(self)
        if is_loopback(self.host):
            return
        if self.token and not (self.require_token or self.tls_mutual):
            raise ConfigError(
                f"--host {self.host} is open to other hosts, and every caller would act with the gateway's token: give "
                "--require-token, or listen on 127.0.0.1"
            )
        if not self.insecure:
            self._refuse_open_port()

    @property
    def lets_everybody_in(self) -> bool:
        """Whether callers need neither a token of their own nor a certificate."""
        return not (self.require_token or self.tls_mutual)

    def _refuse_open_port(self) -> None:
        """Raise ConfigError if other hosts can connect, unless values are encrypted and every caller is known."""
        if not self.tls_cert:
            raise ConfigError(
                f"--host {self.host} is open to other hosts: give --tls-cert and --tls-key, or --insecure"
            )
        if not (self.require_token or self.tls_mutual):
            raise ConfigError(
                f"--host {self.host} is open to other hosts: give --require-token or --tls-mutual, so that only known "
                "callers act with the gateway's rights, or --insecure"
            )
