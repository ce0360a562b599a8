"""The options by which a process learns where its master is and what to show there."""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.config import option
from tanghulu.credentials import Credentials, read_token
from tanghulu.types import Masters

#: Of --master, in every process that has one.
MASTER_HELP = "the master: host:port, several as host:port,host:port, or etcd://host:port[,host:port][/namespace]"

TENANT_HELP = "act for this tenant (needed with an operator's token only)"
TOKEN_HELP = "what to show to a master and nodes with --tokens; @FILE reads it from a file"


@dataclass(frozen=True, kw_only=True)
class MasterOptions:
    """The options of every process that asks a master."""

    master: Masters = option(Masters.parse("127.0.0.1:7400"), MASTER_HELP)
    tenant: str = option("", TENANT_HELP)
    token: str = option("", TOKEN_HELP)

    @property
    def credentials(self) -> Credentials:
        """What the options say; raises ConfigError for a file that cannot be read."""
        return Credentials(self.tenant, read_token(self.token))
