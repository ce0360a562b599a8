"""The cluster secret, ``--cluster-secret``: shared by the processes that compute KV, and unknown to their clients.

Everything derived from it is keyed BLAKE2b (RFC 7693), each with its own purpose:

* the root of block names, so that others cannot compute the names of a prompt's blocks (``hashing.root_hash``);
* signatures of KV in the store, so that only KV of the cluster is loaded (``store.client.signed_kv``);
* a check value that identifies a process's secret without revealing anything about it.

Without a secret the key is empty: names and signatures have the same form, and anybody can make them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from tanghulu.auth.credentials import read_token
from tanghulu.errors import ConfigError

MIN_CHARACTERS: Final = 32
HELP: Final = (
    "secret shared by all conductors, workers and routers, the key of block names and of signatures "
    "of stored KV; @FILE reads it from a file"
)


@dataclass(frozen=True)
class ClusterSecret:
    """The secret; ``text`` "" means no secret."""

    text: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.text)

    @cached_property
    def naming_key(self) -> bytes:
        """The key of block names; b"" without a secret."""
        return self._key(b"names")

    @cached_property
    def signing_key(self) -> bytes:
        """The key of signatures of KV; b"" without a secret."""
        return self._key(b"signatures")

    @cached_property
    def check_value(self) -> bytes:
        """8 bytes, equal for processes that have the same secret; b"" without one."""
        return self._key(b"check")[:8]

    def _key(self, purpose: bytes) -> bytes:
        if not self.text:
            return b""
        return hashlib.blake2b(self.text.encode(), digest_size=32, person=purpose).digest()


NO_SECRET = ClusterSecret()


def make_cluster_secret(path: Path) -> Path:
    """Create a random secret in the file ``path``, readable by its owner only, unless the file exists.

    Returns the file's absolute path; raises ConfigError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        return path.resolve()
    except OSError as error:
        raise ConfigError(f"cannot write the cluster secret to {path}: {error.strerror or error}") from error


def read_cluster_secret(text: str) -> ClusterSecret:
    """Return the secret in ``text``, or in the file FILE if that is ``@FILE``; raises ConfigError, also if short."""
    secret = read_token(text, "the cluster secret")
    if text and len(secret) < MIN_CHARACTERS:
        raise ConfigError(
            f"the cluster secret has {len(secret)} characters; it needs at least {MIN_CHARACTERS}: "
            "create one with `tanghulu keys secret`"
        )
    return ClusterSecret(secret)
