"""Pages of the directory's keys in order, for listings and for the snapshots of followers. Pure; changes nothing."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from tanghulu.store.master.directory.chunk_table import DirectoryTable, FoundChunk


class KeyListing(NamedTuple):
    """One key of a listing."""

    key: str
    found: FoundChunk


def list_keys(table: DirectoryTable, prefix: str, after: str, limit: int) -> tuple[list[KeyListing], bool]:
    """Up to ``limit`` keys that begin with ``prefix``, in order, behind ``after``, and whether there are more."""
    assert limit > 0
    listing: list[KeyListing] = []
    inclusive = after < prefix
    for key in table.keys_from(prefix if inclusive else after, inclusive=inclusive):
        if not key.startswith(prefix):
            break
        found = table.find(key)
        if found is not None:
            if len(listing) == limit:
                return listing, True
            listing.append(KeyListing(key, found))
    return listing, False


def snapshot(table: DirectoryTable, prefix: str, after: str, num_keys: int) -> tuple[dict[str, list[str]], str | None]:
    """A page of a snapshot for followers: node id -> keys, and where to go on (None: that was all).

    Pages may be taken at different times, if all changes since before the first are applied after the last:
    of each (node, key) the last change decides, and without a change every page tells the same.
    """
    inclusive = after < prefix or not after
    keys = list(islice(table.keys_from(max(after, prefix), inclusive=inclusive), num_keys))
    page: dict[str, list[str]] = {}
    for key in keys:
        if not key.startswith(prefix):
            return page, None
        found = table.find(key)
        for node_id in found.node_ids if found is not None else ():
            page.setdefault(node_id, []).append(key)
    return page, keys[-1] if len(keys) == num_keys else None
