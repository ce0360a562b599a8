"""Pages of the directory's keys: ordered for listings, unordered for the snapshots of followers. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.protocol.directory_messages import KeyInfo

#: Keys without a holder that one page walks over: about 10 ms.
MAX_DEAD = 4096


class KeyPage(NamedTuple):
    """Keys in order; whether there may be more; and where to resume, if the step ended before the page was full."""

    keys: list[KeyInfo]
    more: bool
    walked_to: str | None = None


def list_keys(directory: RangeDirectories, prefix: str, after: str, limit: int) -> KeyPage:
    """Return up to ``limit`` keys with ``prefix`` in order behind ``after``, and whether there are more.

    A walk over MAX_DEAD keys without holders ends the page, and so does an order still to be built: the caller
    resumes behind ``walked_to`` in another step.
    """
    assert limit > 0
    listing: list[KeyInfo] = []
    num_dead = 0
    inclusive = after < prefix
    keys = directory.keys_from(prefix if inclusive else after, inclusive=inclusive)
    if keys is None:
        return KeyPage([], True, after)
    for key in keys:
        if not key.startswith(prefix):
            break
        found = directory.find(key)
        if found is not None:
            if len(listing) == limit:
                return KeyPage(listing, True)
            listing.append(KeyInfo(key, found.size_bytes, found.version, found.node_ids))
            continue
        num_dead += 1
        if num_dead >= MAX_DEAD:
            return KeyPage(listing, True, key)
    return KeyPage(listing, False)


def snapshot(
    directory: RangeDirectories, walk: Iterator[str], prefix: str, num_keys: int
) -> tuple[dict[str, list[str]], bool]:
    """Return a page of a snapshot: the next ``num_keys`` of ``walk`` as node id -> keys, and if there are more.

    Pages may be taken at different times, if all changes since before the first are applied after the last: for each
    (node, key) the last change decides, and without a change every page states the same.
    """
    keys = list(islice(walk, num_keys))
    page: dict[str, list[str]] = {}
    for key in keys:
        found = directory.find(key) if key.startswith(prefix) else None
        for node_id in found.node_ids if found is not None else ():
            page.setdefault(node_id, []).append(key)
    return page, len(keys) == num_keys
