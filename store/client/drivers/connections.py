"""How a peer is reached and greeted, and what is known of nodes that were: what both drivers share, without I/O."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from tanghulu.auth import certificate_roles
from tanghulu.auth.certificate_roles import NODE
from tanghulu.auth.credentials import TlsFiles
from tanghulu.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeUnavailable,
    PeerSilent,
    TanghuluError,
)
from tanghulu.rpc.fast_client import LateReplies
from tanghulu.runtime.clock import Clock
from tanghulu.runtime.fork import refuse_inherited
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import NodeLink, PeerId, is_master, is_owner, owner_address
from tanghulu.store.client.logic.placement import PROBE_S, NodeTable
from tanghulu.store.client.settings import Settings
from tanghulu.store.protocol.messages import Welcome
from tanghulu.transfer_engine.core.segment import SessionKey
from tanghulu.transfer_engine.engine import RemoteSegment
from tanghulu.types import Address


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of a peer; ``unix_path`` is preferred where there is one. ``shortcut``: see ``FastConnection``."""

    address: Address
    unix_path: str | None
    shortcut: bool = False


class OtherNode(NodeUnavailable):
    """Another node listens at a node's Unix path, as in a container with a run directory of its own: use TCP."""


class NodeSessions:
    """The nodes that one client has greeted: how each answered, and their open segments."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings, self._context = settings, context
        self._welcomes: dict[PeerId, Welcome] = {}
        self._links: dict[tuple[SessionKey, bool], NodeLink] = {}  # by session, and whether it copies
        self._of_others: dict[PeerId, str] = {}  # Unix paths of nodes at which, in this mount namespace, others listen

    def target(self, peer: PeerId) -> Target:
        """As ``target_of``, by TCP alone if the node's Unix path has turned out to be another's here."""
        target = target_of(peer, self._settings, self._context.nodes, self._context.clock.now_s())
        if target.unix_path is not None and self._of_others.get(peer) == target.unix_path:
            return replace(target, unix_path=None)
        return target

    def hello(self, peer: PeerId, target: Target) -> messages.AnyCall:
        """The first call on a connection to the node ``peer``."""
        settings, held = self._settings, self._context.leases.held(peer)
        shown = settings.master.credentials.to(target.address, target.unix_path)
        return messages.hello(settings.client_id, shown, settings.host_id, target.unix_path is not None, held)

    def greeted(self, peer: PeerId, target: Target, reply: messages.AnyReply) -> Welcome:
        """The answer to ``hello``; a new session ends the old one.

        Raises OtherNode if another node listens at the Unix path, and NodeUnavailable if one does at the address.
        """
        welcome = messages.welcome(reply)
        if welcome.instance_id != peer and target.unix_path is not None:
            self._of_others[peer] = target.unix_path
            raise OtherNode(f"at {target.unix_path} {welcome.instance_id} listens, not {peer}")
        if welcome.instance_id != peer:
            raise NodeUnavailable(f"{target.address} is {welcome.instance_id} now, not {peer}")
        known = self._welcomes.get(peer)
        if known is not None and known.session != welcome.session:
            self._close_links(known)
        self._welcomes[peer] = welcome
        self._context.nodes.answered(peer)
        self._context.greeted.add(peer)
        self._context.forget(peer)
        return welcome

    def patience_s(self, peer: PeerId, left_s: float) -> float:
        """How long to wait for the answer of the node ``peer`` to its greeting, or to a probe."""
        return min(left_s, PROBE_S) if self._context.nodes.is_suspect(peer) else left_s

    def unanswered(self, peer: PeerId, error: TanghuluError) -> TanghuluError:
        """Note that the node ``peer`` did not answer in time; return the error for the caller."""
        nodes = self._context.nodes
        failure = silent(peer) if nodes.is_suspect(peer) else error
        nodes.suspect(peer, self._context.clock.now_s())
        return failure

    def tls(self, peer: PeerId) -> TlsFiles:
        """What to connect to ``peer`` with."""
        return self._settings.master.credentials.tls.to(certificate_roles.MASTER if is_master(peer) else NODE)

    def unreachable(self, peer: PeerId, error: TanghuluError) -> None:
        """Note that no connection to ``peer`` came about."""
        if is_owner(peer):
            return
        self._context.nodes.expire()
        if isinstance(error, PeerSilent) and peer:
            self._context.nodes.note_silent(peer, self._context.clock.now_s())

    def ungreeted(self, peer: PeerId, error: TanghuluError) -> TanghuluError:
        """The error for the caller of ``peer``, whose greeting failed."""
        is_silence = isinstance(error, DeadlineExceeded) and not is_master(peer)
        return self.unanswered(peer, error) if is_silence else error

    def take_departed(self) -> list[PeerId]:
        """Close the segments of nodes that are gone, and forget them; which these are."""
        context, gone = self._context, list(self._context.departed)
        for peer in gone:
            context.departed.discard(peer)
            context.greeted.discard(peer)
            self._of_others.pop(peer, None)
            welcome = self._welcomes.pop(peer, None)
            if welcome is not None:
                self._close_links(welcome)
            context.forget(peer)
        return gone

    def _close_links(self, welcome: Welcome) -> None:
        for copies in (False, True):
            link = self._links.pop((welcome.session, copies), None)
            if link is not None:
                link.remote.close()

    def link(self, node: PeerId, copies: bool) -> NodeLink | NodeUnavailable | Welcome:
        """The open segment of ``node``, or what says where to open it."""
        welcome = self._welcomes.get(node)
        if welcome is None:
            return NodeUnavailable(f"the connection to {node} was lost")
        link = self._links.get((welcome.session, copies))
        return link if link is not None and link.remote.alive else welcome

    def opened(self, welcome: Welcome, copies: bool, remote: RemoteSegment) -> NodeLink:
        """The segment that ``welcome`` names is open."""
        link = self._links[welcome.session, copies] = NodeLink(remote)
        return link

    def close(self) -> None:
        """The client is closed: forget all segments."""
        self._links.clear()


def warn_unclosed(client: object) -> None:
    """Say which client was left open."""
    warnings.warn(f"unclosed {client!r}; call close(), or use it in a with", ResourceWarning, stacklevel=3)


def late_replies(context: Context, peer: PeerId, then: Callable[[], None]) -> LateReplies:
    """Of ``peer``: what is granted to somebody who does not wait any more is given back; ``then`` is called behind."""

    def give_back(reply: messages.GrantingReply) -> None:
        context.return_granted(peer, reply)
        then()

    return dict.fromkeys(messages.GRANTING, give_back)


def target_of(peer: PeerId, settings: Settings, nodes: NodeTable, now_s: float) -> Target:
    """Where the node or owner ``peer`` listens.

    Raises NodeUnavailable for a node that the master does not list, or whose host did not answer a moment ago.
    """
    if is_owner(peer):
        return Target(owner_address(peer), None, settings.uses_unix)
    node = nodes.get(peer)
    if node is None:
        raise NodeUnavailable(f"node {peer} is not known at the master (any more)")
    if nodes.is_silent(peer, now_s):
        raise silent(peer)
    near = settings.uses_unix and node.host_id == settings.host_id and bool(node.unix_path)
    return Target(Address.parse(node.address), node.unix_path if near else None)


def silent(peer: PeerId) -> NodeUnavailable:
    """The error of a node that is not called for a while."""
    return NodeUnavailable(f"node {peer} did not answer a moment ago")


def refuse_closed(opened_by: int, connect: str) -> None:
    """Raise what a client says that cannot be used: it was closed, or another process, ``opened_by``, opened it."""
    refuse_inherited("this client", opened_by, f"call {connect}() in the child")
    raise InvalidRequest("the client is closed")


def make_context(settings: Settings, clock: Clock) -> Context:
    """The memory of a client with these settings."""
    nodes = NodeTable(settings.host_id)
    return Context(
        settings.host_id,
        settings.place,
        clock,
        nodes,
        settings.uses_unix,
        settings.wait_s,
        settings.streams,
        settings.waits_for_master,
    )
