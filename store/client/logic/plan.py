"""The route of a put: the one table of carriers and committers. Pure.

Every put is the same three steps: reserve memory at a node, fill it, commit the chunk at the master. Routes differ in
the *carrier* of the bytes, and in the *committer*, which informs the master:

    BUFFER    reserved in advance: the client copies the value into its write buffer in the node's memory
    INLINE    all three steps in one message: the value travels behind the request, and the node receives it in place
    TRANSFER  the node reserves a range, the transfer engine fills it, another message commits it

    CLIENT    the client calls the master, while the bytes are in transit if possible
    NODE      the node notifies the master when it has the bytes, and then answers

The CLIENT commits values that go by BUFFER, and the transfers marked with a star; the NODE all others.

                                  up to 64 KiB    up to 1 MiB    larger
    1 replica   memory mapped     BUFFER          BUFFER         TRANSFER*
                to be mapped      INLINE          TRANSFER*      TRANSFER*
                over tcp          INLINE          INLINE         TRANSFER
                over UCX, verbs   INLINE          TRANSFER       TRANSFER
    2 and more  over tcp          INLINE          INLINE         TRANSFER
                all others        INLINE          TRANSFER       TRANSFER

So 200 KiB with two replicas over tcp go INLINE to each node, and the nodes commit. Other reasons that exclude a route
(pins, a preferred node, several items, a failed earlier try ...) are at its row in ``plan``.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol import write_buffer
from tanghulu.store.protocol.types import MAX_INLINE_BYTES, MAX_MESSAGE_BYTES, NewChunk, Pin

#: Larger values do not go into write buffers: a range of their own wastes less.
MAX_BUFFERED_BYTES = 1 << 20
#: A longer time to live does not fit into the record of a write buffer.
MAX_BUFFERED_TTL_S = 1e6


class Carrier(Enum):
    """Means by which the bytes of a value reach their node."""

    INLINE = "inline"
    BUFFER = "buffer"
    TRANSFER = "transfer"

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is a Python call for every look-up


class Committer(Enum):
    """The party that commits the chunk at the master."""

    CLIENT = "client"
    NODE = "node"

    __hash__ = object.__hash__  # see Carrier


class Access(Enum):
    """This client's access to a node's memory."""

    MAPPED = "mapped"  # it is mapped here, and the node lives
    NEAR = "near"  # the node is on this host; its memory is mapped with the first message
    MESSAGES = "messages"  # over tcp: values up to 1 MiB may travel inside messages
    ENGINE = "engine"  # over UCX or verbs, the preferred transports of larger values

    __hash__ = object.__hash__  # see Carrier


class Route(NamedTuple):
    """The route of one value to one node."""

    carrier: Carrier
    committer: Committer


BUFFER = Route(Carrier.BUFFER, Committer.CLIENT)
INLINE = Route(Carrier.INLINE, Committer.NODE)
TRANSFER, PLAIN_TRANSFER = Route(Carrier.TRANSFER, Committer.CLIENT), Route(Carrier.TRANSFER, Committer.NODE)


def plan(
    new: NewChunk,
    options: PutOptions,
    access: Access,
    *,
    several: bool = False,
    in_round: bool = False,
    in_pieces: bool = False,
) -> Route:
    """Return the route of ``new`` to a node with that ``access``; the first row that fits.

    ``several``: other items of the same put travel with it. ``in_round``: it travels in a round of the put, with others
    or after a failed first try. ``in_pieces``: the value is not contiguous.
    """
    size, alone = new.size_bytes, new.replicas == 1
    # A small value goes into the write buffer: no process but the master's has to wake. There is one value, of one
    # replica, that all see; a node preferred by the caller is called itself.
    if (
        access is Access.MAPPED
        and size <= MAX_BUFFERED_BYTES
        and alone
        and options.visible
        and options.prefer_node is None
        and not in_round
        and not in_pieces
        and fits_record(new, options.part_bytes)
    ):
        return BUFFER
    # A small value goes inside the request: one round trip, and the node copies little. Over a socket that delivers
    # even 1 MiB sooner than a reservation, a transfer and a commit. Several such values go together by the transfer
    # engine, which moves all of them at once and has them committed by one call.
    if size <= MAX_INLINE_BYTES or (access is Access.MESSAGES and size <= MAX_MESSAGE_BYTES and not several):
        return INLINE
    # Through mapped memory the bytes arrive within some milliseconds unless the node has ended, and then its pending
    # commits end, too: the client may commit ahead (see ``joint_committer``). Each replica is reported by its own node.
    if access in (Access.MAPPED, Access.NEAR) and alone and options.visible:
        return TRANSFER
    return PLAIN_TRANSFER


def fits_record(new: NewChunk, part_bytes: int) -> bool:
    """Return whether a write buffer's record can express all of ``new``; ``part_bytes``: of its checksums to come.

    A hard pin needs the node's consent, a value in parts has more checksums than a record, and its key is bounded.
    """
    key, sums, ttl_s = new.key, new.checksums, new.ttl_s
    return (
        new.pin is not Pin.HARD
        and len(sums.parts) <= 1
        and not (sums.part_bytes or part_bytes)
        and (ttl_s is None or ttl_s < MAX_BUFFERED_TTL_S)
        and (len(key) <= write_buffer.MAX_KEY_BYTES // 4 or len(key.encode()) <= write_buffer.MAX_KEY_BYTES)
    )


def joint_committer(routes: Collection[Route], num_nodes: int, *, by_mapping: bool) -> Committer:
    """Return the committer of values transferred together, once their ranges are reserved.

    The client commits if it may for every one of them, since one call covers one node and all values or none.
    ``by_mapping``: all go through the mapped memory of a live node; a node may refuse the use of its mapping, and bytes
    through a socket may take long.
    """
    may = num_nodes == 1 and by_mapping and all(route.committer is Committer.CLIENT for route in routes)
    return Committer.CLIENT if may else Committer.NODE
