"""Files of API keys for tests, and the routes that keys are asked for at."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tanghulu.auth.api_keys import new_key
from tanghulu.auth.tenants import hash_of

SECRETS = {name: new_key() for name in ("user", "other", "watcher", "admin", "limited", "acme", "mallory")}


def write_keys(path: Path, **entries: str) -> Path:
    """A file of keys; ``entries`` are the further lines of each."""
    rows = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{hash_of(SECRETS[name])}"\n{lines}\n' for name, lines in entries.items()
    ]
    path.touch(0o600)
    path.write_text("\n".join(rows))
    return path


def bearer(name: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"authorization": f"Bearer {SECRETS[name]}"}


def routes_of(routes: Iterable[Any]) -> set[tuple[str, str]]:
    """(method, path) of ``routes``, and of the routers that were included among them."""
    found = set()
    for route in routes:
        included = getattr(route, "original_router", None)
        if included is not None:
            found |= routes_of(included.routes)
        else:
            found |= {(method, route.path) for method in route.methods}
    return found
