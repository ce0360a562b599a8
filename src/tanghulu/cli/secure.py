"""The keys, tokens and certificates of a cluster: ``tanghulu secrets init FOLDER``, and ``up --secure`` in its state.

    certs/      an authority's certificate, and one for each role (``tanghulu certs init``)
    tokens.toml the hashes of three tokens: the cluster's own, the operator's, and Prometheus's
    cluster.secret  the source of block names and KV signatures
    cluster.token, operator.token, metrics.token, api.key      secrets, for their owner only
    keys.toml   the API keys (``tanghulu keys``); the first, ``operator``, is in api.key

The authority's key is deleted after signing: a reader of the folder cannot make further certificates. If one is
missing or lacks a host, or they expire within a month, all are made anew, and clients need the new ``ca.pem``.

Children get the names of these files and never a secret, so none appears in ``ps``, in logs or in cluster.json.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from tanghulu.auth.api_keys import KeyRight, new_key
from tanghulu.auth.certificate_roles import CONDUCTOR, ROLES, WORKER
from tanghulu.auth.cluster_secret import make_cluster_secret
from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tenants import Right, new_token
from tanghulu.cli import certs, keys
from tanghulu.cli.printing import write_private
from tanghulu.errors import ConfigError

_CERTIFICATES: Final = {"prefill": WORKER, "decode": WORKER, "vllm-worker": WORKER}
_RENEWED_AFTER_S: Final = (certs.DAYS - 30) * 86_400
_TOKENS: Final = {
    "cluster": (Right.READ, Right.WRITE, Right.JOIN),
    "operator": (Right.ADMIN,),
    "metrics": (Right.METRICS,),
}


@dataclass(frozen=True, slots=True)
class SecureFiles:
    """The files in ``folder``."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The authorities' certificate by which clients verify the cluster."""
        return self.folder / "certs" / "ca.pem"

    @property
    def key_file(self) -> Path:
        """The file with the operator's API key."""
        return self.folder / "api.key"

    @property
    def tls(self) -> TlsFiles:
        """The TLS files of a client of the HTTP API."""
        return TlsFiles(ca=str(self.authority)).to(CONDUCTOR)

    def options(self, role: str) -> list[str]:
        """Return the options of a child, pairs of a flag and its value."""
        certificate = self.folder / "certs" / _CERTIFICATES.get(role, role)
        tls = ("--tls-cert", f"{certificate}.pem", "--tls-key", f"{certificate}.key", "--tls-ca", str(self.authority))
        own = () if role == "master" else ("--token", f"@{self.folder / 'cluster.token'}")
        api = ("--api-keys", str(self.folder / "keys.toml")) if role == "conductor" else ()
        return [*tls, *own, *api, "--tokens", str(self.folder / "tokens.toml")]

    def flags(self, role: str) -> list[str]:
        """Return further options, which have no value: callers of conductor and gateway have no certificates."""
        return {"conductor": [], "gateway": ["--require-token"]}.get(role, ["--tls-mutual"])


def prepare(folder: Path, hosts: tuple[str, ...]) -> SecureFiles:
    """Make the missing files in ``folder``, for a cluster reached at ``hosts``. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        _certify(folder / "certs", tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1"))))
        make_cluster_secret(folder / "cluster.secret")
        if not (folder / "tokens.toml").exists():
            _make_tokens(folder)
        if not (folder / "keys.toml").exists():
            key = new_key()
            write_private(folder / "api.key", f"{key}\n".encode())
            keys.add(folder / "keys.toml", "operator", key, (KeyRight.ADMIN.value,))
        elif not (folder / "api.key").exists():
            raise ConfigError(
                f"{folder}/api.key is missing: restore it, or make another key with "
                f"`tanghulu keys create {folder}/keys.toml NAME --right admin > {folder}/api.key`"
            )
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    return SecureFiles(folder)


def _certify(folder: Path, hosts: tuple[str, ...]) -> None:
    authority, key = folder / "ca.pem", folder / "ca.key"
    if authority.exists() and not key.exists():
        is_new = time.time() - authority.stat().st_mtime < _RENEWED_AFTER_S
        if is_new and all((folder / f"{role}.pem").exists() for role in ROLES) and certs.hold_for(folder, hosts):
            return
        shutil.rmtree(folder)
    certs.make(folder, hosts, certs.DAYS)
    key.unlink()


def _make_tokens(folder: Path) -> None:
    entries = []
    for name, rights in _TOKENS.items():
        token = new_token()
        write_private(folder / f"{name}.token", f"{token}\n".encode())
        named = ", ".join(f'"{right.value}"' for right in rights)
        entries.append(f'[[tokens]]\nname = "{name}"\nrights = [{named}]\nsha256 = "{hash_of(token)}"\n')
    write_private(folder / "tokens.toml", ("\n".join(entries) + "\n").encode())


@click.group("secrets", help="Make the secrets of a cluster: certificates, tokens, an API key.")
def COMMAND() -> None:
    """The command group; its command follows."""


@COMMAND.command("init", short_help="Make all secrets of a cluster.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("secrets"))
@click.option("--host", "hosts", multiple=True, help=certs.HOST_HELP)
def init(folder: Path, hosts: tuple[str, ...]) -> None:
    """Make certificates, tokens and keys for a secure cluster in FOLDER; existing files are kept.

    Certificates that lack a host are made anew.

    Each process gets tokens.toml, cluster.token, certs/ca.pem and its role's certificate; conductors get keys.toml too.
    operator.token is for `tanghulu store` and `tanghulu drain`, metrics.token for Prometheus, api.key for the HTTP API.
    """
    files = prepare(folder, hosts)
    click.echo(f"{files.folder}: certificates, tokens and an API key")
    for role in ("master", "node", "worker", "conductor"):
        secret = ["--cluster-secret", f"@{files.folder}/cluster.secret"] if role in ("worker", "conductor") else []
        click.echo(f"\n  tanghulu {role} {' '.join([*files.options(role), *files.flags(role), *secret])}")
