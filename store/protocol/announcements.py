"""The messages of ANNOUNCE: chunks that a node holds now or no longer, and the master's answers.

The directory decides by the same values; the rules are ``store.master.directory``'s. ``validate`` checks the number of
keys in one message, and the fields' types everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from tanghulu.rpc.wire import U32, U64, FastMessage
from tanghulu.store.protocol.directory_messages import NodeView, check_count
from tanghulu.store.protocol.key_slots import ALL_BITS, NUM_RANGES, NUM_SLOTS, RANGE_SLOTS
from tanghulu.store.protocol.terms import NO_TERM, UNSIGNED, Signature, Term
from tanghulu.store.protocol.types import Key
from tanghulu.types import MAX_VALUE_BYTES

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_VALUE_BYTES)]
_Range: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=NUM_RANGES)]
_Slots: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=RANGE_SLOTS)]


class ChunkEntry(NamedTuple):
    """One announced chunk; ``cold``: on the node's SSD, not in its memory.

    ``unconfirmed``: no master has accepted this put yet, so its success is not acknowledged. Equal versions are
    replicas of one put.
    """

    key: Key
    version: U64
    size_bytes: _Size
    cold: bool = False
    unconfirmed: bool = False


class ReportPiece(FastMessage, frozen=True):
    """A piece of a node's report of all its chunks, slot by slot (see ``key_slots``).

    The pieces of one report are numbered from 0; with this piece all slots below ``next_slot`` are reported.
    The same piece may come again. ``entries`` are (key, version, size in bytes, is it cold) of confirmed chunks.
    """

    number: U32
    next_slot: Annotated[int, msgspec.Meta(ge=0, le=NUM_SLOTS)]
    entries: Sequence[tuple[Key, U64, _Size, bool]] = ()


class Removal(NamedTuple):
    """A chunk no longer held by the node, or a put that it aborted; other versions of the key are unaffected."""

    key: Key
    version: U64


class NodeAnnouncement(FastMessage, frozen=True):
    """The chunks that a node holds now or no longer; ``deleted`` is ``removed``, and the version must not come back.

    ``retracted`` are puts that failed before their values were complete, because their clients died or gave up: a
    client's commit of them is void. They are undone before all else, and not repeated when the message is lost.

    ``report_id`` is of the running report, 0 if there is none, ``ranges`` are those that it covers, None: all that the
    master owns, and ``piece`` is a piece of it. ``capacity_bytes`` 0 leaves capacity and use unspecified.

    The next four are for the planner of copies: wanted replicas of added chunks that want several, whether a draining
    node has no work in progress, the most-read keys with the number of gets since the last message, and failed ordered
    copies. ``tenants``: once a second the bytes here of those with a quota for all nodes together.

    ``map_version`` is of the map of masters used by the node; 0: it has none, and takes this master for the owner of
    all ranges. By that map the ranges ``owned``, a bit for each, are this master's; 0: a sign of life to the leader.
    ``term`` is the newest known to the node, of the ranges here or of any elected master.
    """

    node_id: str
    generation: U64
    added: Sequence[ChunkEntry] = ()
    removed: Sequence[Removal] = ()
    deleted: Sequence[Removal] = ()
    retracted: Sequence[Removal] = ()
    report_id: U64 = 0
    piece: ReportPiece | None = None
    ranges: frozenset[_Range] | None = None
    capacity_bytes: U64 = 0
    used_bytes: U64 = 0
    ssd_capacity_bytes: U64 = 0
    ssd_used_bytes: U64 = 0
    replicated: Sequence[tuple[Key, U32]] = ()
    quiet: bool = False
    hot: Sequence[tuple[Key, U32]] = ()
    failed_copies: Sequence[Key] = ()
    tenants: Mapping[str, U64] | None = None
    map_version: U64 = 0
    owned: U64 = 0
    term: Term = NO_TERM

    def validate(self) -> None:
        """Refuse too many keys."""
        check_count(len(self.added) + len(self.removed) + len(self.deleted) + len(self.retracted))
        check_count(0 if self.piece is None else len(self.piece.entries))

    @property
    def reported_ranges(self) -> int:
        """The ranges whose keys the node reports to this master, a bit for each."""
        return self.owned if self.map_version else ALL_BITS

    def keys(self) -> Iterator[str]:
        """Yield all keys of chunks that the node reports as held, or no longer held."""
        yield from (entry.key for entry in self.added)
        yield from (removal.key for removal in chain(self.removed, self.deleted, self.retracted))
        if self.piece is not None:
            yield from (entry[0] for entry in self.piece.entries)


class CopyOrder(NamedTuple):
    """Pull ``key`` at ``version`` from the node ``source``, then announce it."""

    key: str
    version: U64
    source: str


class DropOrder(NamedTuple):
    """Drop your copy, unless it is pinned hard; if the chunk was ``removed`` at another holder, even then."""

    key: str
    version: U64
    removed: bool = False


class Orders(FastMessage, frozen=True):
    """Work for a node: copies to pull from ``sources``, and copies to drop."""

    copies: Sequence[CopyOrder] = ()
    drops: Sequence[DropOrder] = ()
    sources: Sequence[NodeView] = ()


class KnownRange(NamedTuple):
    """The number of known slots of a range, from its first on. ``wanted``: the node has not reported it, and is not
    about to.
    """

    number: _Range
    known_slots: _Slots
    wanted: bool


class AnnounceReply(FastMessage, frozen=True):
    """One ``accepted`` for each of ``added``: False if another version was first and the copy must be dropped.

    ``undecided`` are indexes into ``added``: another put of the key is committed by its client, or older chunks may
    have yet to be reported, so these are to be announced again. ``refused`` are indexes into the piece's entries.

    ``report_wanted``: the master does not know the running report; begin it again. ``report_keys``: the number of keys
    that the next piece may have; 0: not yet, ask again. ``ranges``: those that this master owns and that are not
    completely known, or that this node has yet to report; undecided entries in known slots can be announced again.
    ``map_version``, to a node with a map whose ``owned`` does not match this master's ranges: the latest version of the
    map known here.

    ``elsewhere``: bytes that the tenants of the announcement hold on all other nodes; there are ``num_nodes``, 0: none
    were named. The rest is as in LocateReply.
    """

    accepted: Sequence[bool]
    undecided: Sequence[U32] = ()
    refused: Sequence[U32] = ()
    report_wanted: bool = False
    report_keys: U32 = 0
    ranges: Sequence[KnownRange] = ()
    map_version: U64 = 0
    orders: Orders | None = None
    elsewhere: Mapping[str, U64] | None = None
    num_nodes: U32 = 0
    signature: Signature = UNSIGNED
