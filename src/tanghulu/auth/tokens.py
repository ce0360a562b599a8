"""The tokens file, ``--tokens FILE``, which is read again when it changes.

    [tenants.acme]                  # needed only for what differs from the defaults
    quota = "64GiB"                 # maximum bytes on one node; default: unlimited
    cluster_quota = "256GiB"        # maximum bytes on all nodes together; default: unlimited
    shared_memory = true            # its clients may map the nodes' memory: read, and with write change, all of it

    [[tokens]]
    name = "acme-engines"           # for logs and error messages
    tenant = "acme"                 # absent: an operator's token
    rights = ["read", "write"]
    sha256 = "..."                  # of the token; `tanghulu store token` makes both
    expires = 2027-01-31            # optional; a date or a time

The file belongs to this user alone (mode 0600), and is as secret as a private key: derived tokens can be made from it.
It is TOML, or JSON if its name ends in .json.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from tanghulu.auth.credentials import Credentials, place_of
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.private_file import PrivateFile, expiry_unix_s
from tanghulu.auth.tenants import Identity, Right, Tenant, TokenEntry, TokenTable, validate_tenant
from tanghulu.errors import ConfigError
from tanghulu.types import Address, parse_size

#: Every machine has these addresses, so a token derived for one would be valid everywhere.
_WILDCARDS = {"", "0.0.0.0", "::"}


class Tokens:
    """The tokens that a process accepts, and the addresses for which they may be derived."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table
        self._addresses: set[str] = set()

    def refresh(self) -> bool:
        """Check whether the tokens have changed."""
        return False

    def answer_at(self, *addresses: Address, unix_path: str = "") -> None:
        """Accept tokens derived for these addresses: those at which this process listens, and those it registers.

        ``unix_path`` is the socket registered beside them.
        """
        for address in addresses:
            if address.host not in _WILDCARDS:
                self._addresses.update((place_of(address), place_of(address, unix_path)))

    def authenticate(self, credentials: Credentials) -> Identity:
        """Return the identity that ``credentials`` prove here; raises Unauthorized."""
        return self.table.authenticate(credentials, addresses=self._addresses)


class OneToken(Tokens):
    """A token that grants every right, whichever tenant is named; shared by the processes of a cluster."""

    def __init__(self, token: str) -> None:
        super().__init__(TokenTable([TokenEntry("of the cluster", hash_of(token), frozenset({Right.ADMIN}))], {}))

    def authenticate(self, credentials: Credentials) -> Identity:
        """See Tokens."""
        return super().authenticate(replace(credentials, tenant=""))


class _TenantRow(Struct, forbid_unknown_fields=True):
    quota: int | str = 0
    cluster_quota: int | str = 0
    shared_memory: bool = False

    def tenant(self, name: str) -> Tenant:
        return Tenant(validate_tenant(name), parse_size(self.quota), self.shared_memory, parse_size(self.cluster_quota))


class _TokenRow(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    sha256: str
    rights: list[Right] = []
    tenant: str = ""
    expires: Any = None

    def entry(self) -> TokenEntry:
        expires = expiry_unix_s(f"token {self.name!r}", self.expires)
        return TokenEntry(self.name, self.sha256, frozenset(self.rights), self.tenant, expires)


class _TokenRows(Struct, forbid_unknown_fields=True):
    tenants: dict[str, _TenantRow] = {}
    tokens: list[_TokenRow] = []

    def table(self) -> TokenTable:
        if not self.tokens:
            raise ConfigError("it contains no token, so no client could connect; add one with `tanghulu store token`")
        tenants = {name: row.tenant(name) for name, row in self.tenants.items()}
        return TokenTable([row.entry() for row in self.tokens], tenants)


class TokensFile(PrivateFile[_TokenRows, TokenTable], Tokens):
    """The table of a tokens file, as of the last well-formed read. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        PrivateFile.__init__(self, path, f"--tokens {path}", _TokenRows, _TokenRows.table)
        Tokens.__init__(self, self.table)


def load(path: Path) -> TokenTable:
    """Return the table in ``path``; raises ConfigError stating the reason, such as a mode that lets others read it."""
    return TokensFile(path).table
