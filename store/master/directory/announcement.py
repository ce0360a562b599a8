"""The announcement of a node to the directory, and the answer. Values only; the rules are ``directory``'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class ChunkEntry(NamedTuple):
    """One announced chunk; ``cold``: on the node's SSD, and not in its memory."""

    key: str
    version: int
    size_bytes: int
    cold: bool = False


class ReportPart(Enum):
    """The part of a complete report that an announcement is."""

    NONE = 0
    BEGIN = 1
    PIECE = 2
    END = 3

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call for every look-up


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

    ``capacity_bytes`` 0 says nothing of capacity and use. The next four are for the copy planner: wanted replicas of
    added chunks that want several, whether a draining node has nothing under way, the most-read keys with the number of
    gets, and ordered copies that failed. ``retracted``: puts that failed, even if their clients committed them.
    """

    node_id: str
    generation: int
    added: Sequence[ChunkEntry] = ()
    removed: Sequence[str] = ()
    deleted: Sequence[str] = ()
    report: ReportPart = ReportPart.NONE
    capacity_bytes: int = 0
    used_bytes: int = 0
    ssd_capacity_bytes: int = 0
    ssd_used_bytes: int = 0
    replicated: Sequence[tuple[str, int]] = ()
    quiet: bool = False
    hot: Sequence[tuple[str, int]] = ()
    failed_copies: Sequence[str] = ()
    retracted: Sequence[Retraction] = ()


class Announced(NamedTuple):
    """The answer: one ``accepted`` for each added entry; those with an index in ``undecided`` are to be asked again."""

    accepted: list[bool]
    report_wanted: bool
    undecided: list[int]
