"""Tokens derived for one address: presented to a discovered process instead of the caller's own token.

A process that registers an address is dialled by others. A derived token is valid at that address alone, so a
process that registers an address of its own collects nothing usable elsewhere. Its form is ``tgd_<id>_<code>``: the id
names the token, and the code is an HMAC of the address under the token's hash. A process that has the tokens file can
check it, and could make it: the file is as secret as the tokens themselves.

Example: a conductor finds a worker at ``10.0.0.7:8100`` and presents ``tgd_5f0c…_9be2…``. The worker, which has
registered ``10.0.0.7:8100``, accepts it; processes at other addresses reject it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

_PREFIX = "tgd_"
_ID_DIGITS = 16


def hash_of(token: str) -> str:
    """Return the hash of ``token`` as stored in a tokens file: SHA-256 in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def id_of(sha256: str) -> str:
    """Return the public id of the token with this hash."""
    return hash_of(sha256)[:_ID_DIGITS]


def derive(token: str, address: str) -> str:
    """Return the token to present instead of ``token`` to the process that registered ``address``."""
    sha256 = hash_of(token)
    return f"{_PREFIX}{id_of(sha256)}_{_code(sha256, address)}"


def named_in(shown: str) -> str:
    """Return the id in a derived token; "" if the token is not derived."""
    return shown[len(_PREFIX) :].partition("_")[0] if shown.startswith(_PREFIX) else ""


def is_derived_from(sha256: str, shown: str, addresses: Iterable[str]) -> bool:
    """Return whether ``shown`` was derived for one of ``addresses`` from the token with this hash."""
    code = shown.rpartition("_")[2].encode()
    return any(hmac.compare_digest(code, _code(sha256, address).encode()) for address in addresses)


def is_token(own: str, shown: str, addresses: Iterable[str]) -> bool:
    """Return whether ``shown`` is ``own``, or was derived from it for one of ``addresses``."""
    if named_in(shown):
        sha256 = hash_of(own)
        return named_in(shown) == id_of(sha256) and is_derived_from(sha256, shown, addresses)
    return hmac.compare_digest(shown.encode(), own.encode())


def _code(sha256: str, address: str) -> str:
    return hmac.new(sha256.encode(), address.encode(), hashlib.sha256).hexdigest()
