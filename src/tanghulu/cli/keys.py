"""``tanghulu keys``: make, list and revoke the API keys of a file. Processes that use it follow within a second.

The file holds the keys' hashes only. It is edited as text, so that comments and further lines of a key are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tanghulu.auth.api_keys import ApiKey, ApiKeysFile, ApiKeyTable, KeyRight, new_key
from tanghulu.auth.cluster_secret import make_cluster_secret
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tenants import validate_tenant
from tanghulu.cli.printing import print_json, print_outcome
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.config import MOST, FiniteRange

_HEAD = re.compile(r"^\s*\[\[keys\]\]\s*(#.*)?$")
_ANY_HEAD = re.compile(r"^\s*\[")
_FILE = click.argument("file", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="print JSON for programs")


@click.group("keys", help="Make, list and revoke API keys of the HTTP API; make a cluster secret.")
def COMMAND() -> None:
    """The command group; its commands follow."""


@COMMAND.command("create", short_help="Add a key to a file, and print it once.")
@_FILE
@click.argument("name")
@click.option("--tenant", default="", help="tenant of the key; prefixes are shared within a tenant only")
@click.option(
    "--right",
    "rights",
    multiple=True,
    type=click.Choice([right.value for right in KeyRight]),
    help="right of the key; repeatable [default: inference]",
)
@click.option("--requests-per-s", type=FiniteRange(0, MOST), default=0.0, help="0 disables it")
@click.option(
    "--tokens-per-minute",
    type=FiniteRange(0, MOST),
    default=0.0,
    help="limit on tokens of a prompt and its answer; 0 disables it",
)
@click.option(
    "--max-in-flight", type=click.IntRange(0, 10**9), default=0, help="limit on concurrent requests; 0 disables it"
)
@click.option(
    "--weight", type=FiniteRange(0, 1e6, min_open=True), default=1.0, help="turns for each turn of a key with weight 1"
)
@_JSON
def create(file: Path, name: str, tenant: str, rights: tuple[str, ...], as_json: bool, **numbers: float) -> None:
    """Add a key called NAME to FILE, creating the file if necessary, and print the key. It cannot be shown again."""
    made = new_key()
    add(file, name, made, rights or (KeyRight.INFERENCE.value,), tenant, **numbers)
    print_outcome(as_json, {"key": made, "name": name, "sha256": hash_of(made)}, made)


@COMMAND.command("secret", short_help="Make a cluster secret in a file.")
@_FILE
def secret(file: Path) -> None:
    """Make a cluster secret in FILE, which must not exist yet; start all processes with --cluster-secret @FILE."""
    if file.exists():
        raise ConfigError(
            f"{file} exists, and a new secret makes all stored KV useless; remove the file first, or choose another"
        )
    print(f"--cluster-secret @{make_cluster_secret(file)}")


def add(file: Path, name: str, key: str, rights: tuple[str, ...], tenant: str = "", **numbers: float) -> None:
    """Add ``key`` to ``file``; raises ConfigError for an invalid file or name."""
    validate_name(f"{file}: key", name)
    if file.suffix == ".json":
        raise ConfigError(f"{file}: keys are added to TOML files only; enter the SHA-256 of a new key by hand")
    lines = ["[[keys]]", f'name = "{name}"']
    if tenant:
        lines.append(f'tenant = "{validate_tenant(tenant)}"')
    lines.append("rights = [" + ", ".join(f'"{right}"' for right in rights) + "]")
    lines += [f"{field} = {value}" for field, value in numbers.items() if value and (field, value) != ("weight", 1.0)]
    lines.append(f'sha256 = "{hash_of(key)}"')
    with _changing(file) as text:
        text[:] = [*text, *([""] if text else []), *lines]


def validate_name(called: str, name: str) -> None:
    """Raise ConfigError, beginning with ``called``, unless a key or a token may have this name."""
    try:
        ApiKeyTable([ApiKey(name, hash_of(""), frozenset(KeyRight))])
    except ConfigError as error:
        raise ConfigError(f"{called} {error.message.removeprefix('key ')}") from None


@COMMAND.command("list", short_help="List the keys of a file.")
@_FILE
@_JSON
def show(file: Path, as_json: bool) -> None:
    """List the keys of FILE: names, tenants, rights and limits. The keys themselves are not stored."""
    keys = ApiKeysFile(file, called=str(file)).table.keys.values()
    if as_json:
        print_json([_row(key) for key in keys])
        return
    for key in keys:
        usual = [("name", key.name), ("weight", 1.0)]
        row = _row(key)
        rights = ", ".join(row.pop("rights"))
        settings = [f"{field}={value}" for field, value in row.items() if value and (field, value) not in usual]
        click.echo(f"{key.name}: {rights}{'  ' if settings else ''}{' '.join(settings)}")


@COMMAND.command("revoke", short_help="Remove a key from a file.")
@_FILE
@click.argument("name")
def revoke(file: Path, name: str) -> None:
    """Remove the key called NAME from FILE. Answers in progress finish; further requests get 401."""
    if name not in ApiKeysFile(file, called=str(file)).table.keys:
        raise InvalidRequest(f"{file} has no key {name!r}")
    if file.suffix == ".json":
        raise ConfigError(f"{file}: keys are removed from TOML files only; remove its entry by hand")
    with _changing(file) as lines:
        begin, end = _place_of(lines, name)
        del lines[begin:end]
    click.echo(f"{name} is revoked")


def _row(key: ApiKey) -> dict[str, Any]:
    expires = key.expires_unix_s
    return {
        "name": key.name,
        "rights": sorted(right.value for right in key.rights),
        "tenant": key.tenant,
        "requests_per_s": key.limits.requests_per_s,
        "tokens_per_minute": key.limits.tokens_per_minute,
        "max_in_flight": key.limits.max_in_flight,
        "weight": key.weight,
        "shared_prefixes": key.shared_prefixes,
        "expires": "" if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
    }


def _place_of(lines: list[str], name: str) -> tuple[int, int]:
    """Return the lines of the key called ``name``: from its [[keys]] up to the next table. Raises ConfigError."""
    heads = [number for number, line in enumerate(lines) if _HEAD.match(line)]
    named = re.compile(rf"""^\s*name\s*=\s*["']{re.escape(name)}["']\s*(#.*)?$""")
    for begin in heads:
        following = (number for number in range(begin + 1, len(lines)) if _ANY_HEAD.match(lines[number]))
        end = next(following, len(lines))
        if any(named.match(line) for line in lines[begin:end]):
            return begin, end
    raise ConfigError(f"the entry of {name!r} is not written as [[keys]]; remove it by hand")


@contextlib.contextmanager
def _changing(file: Path) -> Iterator[list[str]]:
    """Yield the lines of ``file``, or of its link target, and replace them after the block if they are well-formed."""
    file = Path(os.path.realpath(file))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.with_name(f".{file.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = file.read_bytes().decode("utf-8-sig").splitlines() if file.exists() else []
            yield lines
            scratch = file.with_name(f".{file.stem}.new{file.suffix}")
            scratch.unlink(missing_ok=True)
            with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                out.write(("\n".join(lines) + "\n").encode())
            try:
                ApiKeysFile(scratch, called=str(file))
                scratch.replace(file)
            finally:
                scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot change {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot change {file}: {error}") from error
