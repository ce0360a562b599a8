"""Clusters under test that guard themselves: by tokens, or by mutual TLS."""

from __future__ import annotations

import os
from pathlib import Path

import tanghulu
from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tenants import hash_of
from tanghulu.store.client.client import Client
from tests.store.cluster import Cluster, Process
from tests.tls_files import Authority

TOKENS = {
    "operator": ("", ["admin"]),
    "node": ("", ["join", "read"]),
    "acme": ("acme", ["read", "write"]),
    "acme-reader": ("acme", ["read"]),
    "acme-writer": ("acme", ["write"]),
    "acme-kv": ("acme", ["read", "write", "kv"]),
    "plain": ("", ["read", "write"]),
    "worker": ("", ["read", "write", "join"]),
    "initech": ("initech", ["read", "write"]),
    "temporary": ("initech", ["read"]),
}
FILE = """
[tenants.acme]
shared_memory = true
[tenants.initech]
quota = "8MiB"
"""


def write_tokens(path: Path, names: list[str]) -> None:
    lines = [FILE]
    for name in names:
        tenant, rights = TOKENS[name]
        lines.append(f'[[tokens]]\nname = "{name}"\nrights = {rights}\nsha256 = "{hash_of("secret-" + name)}"')
        lines.append(f'tenant = "{tenant}"' if tenant else "")
    path.touch(mode=0o600)
    path.write_text("\n".join(lines))


class Secured(Cluster):
    """A cluster whose processes were started with ``--tokens``."""

    def __init__(self, file: Path, num_nodes: int = 1) -> None:
        self.file = file
        os.environ["TANGHULU_TOKEN"] = "secret-node"
        self.node_flags = ("--debug", "checks=true", "--tokens", str(file))
        self.nodes = []
        self.masters = [Process("tanghulu.store.master.main", "--port", "0", "--tokens", str(file))]
        try:
            for _ in range(num_nodes):
                self.add_node("64MiB")
        finally:
            del os.environ["TANGHULU_TOKEN"]

    def connect(self, name: str, tenant: str = "", transport: str | None = None) -> Client:
        return tanghulu.connect(self.address, tenant=tenant, token="secret-" + name, transport=transport)


class Encrypted(Cluster):
    """A master and a node with mutual TLS."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.ca = self.authority.ca
        self.cert, self.key = self.authority.sign("host")
        self.flags = ("--tls-cert", self.cert, "--tls-key", self.key, "--tls-ca", self.ca, "--tls-mutual")
        self.node_flags = ("--debug", "checks=true", *self.flags)
        self.nodes = []
        self.masters = [Process("tanghulu.store.master.main", "--port", "0", *self.flags)]
        self.add_node("64MiB")

    @property
    def shown(self) -> dict[str, str]:
        """What a client has to show."""
        return {"tls_ca": self.ca, "tls_cert": self.cert, "tls_key": self.key}

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(self.cert, self.key, self.ca)
