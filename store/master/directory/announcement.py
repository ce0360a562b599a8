"""The directory's answer to an announcement, and what follows for other nodes. Values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StaleHolder(NamedTuple):
    """A node that still holds a chunk which was removed at another node."""

    node_id: str
    key: str
    version: int


class Announced(NamedTuple):
    """The answer: one ``accepted`` for each added entry; those with an index in ``undecided`` are to be asked again.

    ``refused`` are the indexes of the entries of the report's piece that do not stand. ``report_keys``: as many keys
    the next piece may have. ``untold``: the ranges that no report of the node has told, or is about to.
    """

    accepted: list[bool]
    report_wanted: bool
    undecided: list[int]
    refused: Sequence[int] = ()
    report_keys: int = 0
    untold: Sequence[int] = ()
