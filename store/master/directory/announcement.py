"""The announcement of a node to the directory, and the answer. Values only; the rules are ``directory``'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tanghulu.store.protocol.key_slots import ALL_BITS


class ChunkEntry(NamedTuple):
    """One announced chunk; ``cold``: on the node's SSD, and not in its memory.

    ``unconfirmed``: no master has accepted this put yet, so nobody was told that it succeeded.
    """

    key: str
    version: int
    size_bytes: int
    cold: bool = False
    unconfirmed: bool = False


@dataclass(frozen=True, slots=True)
class ReportPiece:
    """A piece of a node's report of all that it holds, slot by slot (see ``key_slots``).

    The pieces of one report are numbered from 0; with this piece all slots below ``next_slot`` have been told.
    The same piece may come again. ``entries`` are (key, version, size in bytes, is it cold) of confirmed chunks.
    """

    number: int
    next_slot: int
    entries: Sequence[tuple[str, int, int, int]] = ()


class Removal(NamedTuple):
    """A chunk that the node holds no longer; another version of the key is not meant."""

    key: str
    version: int


class Retraction(NamedTuple):
    """A put that the node aborted before its value was whole: its client died, or gave up."""

    key: str
    version: int


class StaleHolder(NamedTuple):
    """A node that still holds a chunk which was removed at another node."""

    node_id: str
    key: str
    version: int


@dataclass(slots=True)
class NodeAnnouncement:
    """The chunks that a node holds now or no longer; ``deleted`` is ``removed``, and the version must not come back.

    ``report_id`` is of the report that is under way, 0 if none is, ``ranges`` are those that it is of, None: all that
    the master owns, and ``piece`` is a piece of it.
    ``capacity_bytes`` 0 says nothing of capacity and use. The next four are for the copy planner: wanted replicas of
    added chunks that want several, whether a draining node has nothing under way, the most-read keys with the number of
    gets, and ordered copies that failed. ``retracted``: puts that failed, even if their clients committed them.
    ``told``: the ranges whose keys the node tells this master, a bit for each; a sign of life is silent about all.
    """

    node_id: str
    generation: int
    added: Sequence[ChunkEntry] = ()
    removed: Sequence[Removal] = ()
    deleted: Sequence[Removal] = ()
    report_id: int = 0
    piece: ReportPiece | None = None
    capacity_bytes: int = 0
    used_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0
    replicated: Sequence[tuple[str, int]] = ()
    quiet: bool = False
    hot: Sequence[tuple[str, int]] = ()
    failed_copies: Sequence[str] = ()
    retracted: Sequence[Retraction] = ()
    ranges: frozenset[int] | None = None
    told: int = ALL_BITS


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
