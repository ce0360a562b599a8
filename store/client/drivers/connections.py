"""How a peer is reached and greeted: pure choices that both shells share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tanghulu.errors import DeadlineExceeded, MasterUnavailable, NodeUnavailable, TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.logic.placement import NodeTable
from tanghulu.store.client.settings import Settings
from tanghulu.types import Address


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of a peer; ``unix_path`` is preferred where there is one. ``shortcut``: see ``FastConnection``."""

    address: Address
    unix_path: str | None
    shortcut: bool = False

    def hello(self, settings: Settings, held: Iterable[int]) -> messages.AnyCall:
        """The first call on a connection to a node."""
        wants_shm = self.unix_path is not None
        return messages.hello(settings.client_id, settings.master.credentials, settings.host_id, wants_shm, held)


def target_of(peer: PeerId, settings: Settings, nodes: NodeTable) -> Target:
    """Where the node ``peer`` listens; raises NodeUnavailable for one that the master does not list."""
    node = nodes.get(peer)
    if node is None:
        raise NodeUnavailable(f"node {peer} is not known at the master (any more)")
    near = settings.uses_unix and node.host_id == settings.host_id and bool(node.unix_path)
    return Target(Address.parse(node.address), node.unix_path if near else None)


def master_failure(master: Masters, error: TanghuluError) -> TanghuluError:
    """What a failed connection to the master, or its silence, means to the caller; its own errors stay."""
    if isinstance(error, NodeUnavailable | DeadlineExceeded):
        return MasterUnavailable(f"no master answered at {master}: {error.message}")
    return error
