"""Addresses and greetings of peers, and the state of greeted nodes: the part shared by both drivers, without I/O."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from tanghulu.auth import certificate_roles
from tanghulu.auth.certificate_roles import NODE
from tanghulu.auth.credentials import TlsFiles
from tanghulu.errors import (
    DeadlineExceeded,
    NodeUnavailable,
    PeerSilent,
    TanghuluError,
)
from tanghulu.rpc.fast_client import LateReplies
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
    """Addresses of a peer; ``unix_path`` is preferred if present. ``shortcut``: see ``FastConnection``."""

    address: Address
    unix_path: str | None
    shortcut: bool = False


class OtherNode(NodeUnavailable):
    """Another node listens at a node's Unix path, as in a container with its own run directory: use TCP."""


class NodeSessions:
    """The nodes greeted by one client: their answers, and their open segments."""

    def __init__(self, settings: Settings, context: Context) -> None:
        self._settings, self._context = settings, context
        self._welcomes: dict[PeerId, Welcome] = {}
        self._links: dict[tuple[SessionKey, bool], NodeLink] = {}  # by session, and whether it copies
        self._of_others: dict[PeerId, str] = {}  # Unix paths of nodes that belong to others in this mount namespace

    def target(self, peer: PeerId) -> Target:
        """Return the target as ``target_of`` does, but by TCP only if the Unix path here belongs to another node."""
        target = target_of(peer, self._settings, self._context.nodes, self._context.clock.now_s())
        if target.unix_path is not None and self._of_others.get(peer) == target.unix_path:
            return replace(target, unix_path=None)
        return target

    def hello(self, peer: PeerId, target: Target) -> messages.AnyCall:
        """Return the first call on a connection to the node ``peer``."""
        settings, held = self._settings, self._context.leases.held(peer)
        shown = settings.master.credentials.to(target.address, target.unix_path)
        return messages.hello(settings.client_id, shown, settings.host_id, target.unix_path is not None, held)

    def greeted(self, peer: PeerId, target: Target, reply: messages.AnyReply) -> Welcome:
        """Take the answer to ``hello``; a new session ends the old one.

        Raises OtherNode if another node listens at the Unix path, and NodeUnavailable if another listens at the
        address.
        """
        welcome = messages.welcome(reply)
        if welcome.instance_id != peer and target.unix_path is not None:
            self._of_others[peer] = target.unix_path
            raise OtherNode(f"{welcome.instance_id} listens at {target.unix_path}, not {peer}")
        if welcome.instance_id != peer:
            raise NodeUnavailable(f"{welcome.instance_id} listens at {target.address} now, not {peer}; try again")
        known = self._welcomes.get(peer)
        if known is not None and known.session != welcome.session:
            self._close_links(known)
        self._welcomes[peer] = welcome
        self._context.nodes.answered(peer)
        self._context.greeted.add(peer)
        self._context.forget(peer)
        return welcome

    def patience_s(self, peer: PeerId, left_s: float) -> float:
        """Return the seconds to wait for the answer of the node ``peer`` to its greeting, or to a probe."""
        return min(left_s, PROBE_S) if self._context.nodes.is_suspect(peer) else left_s

    def unanswered(self, peer: PeerId, error: TanghuluError) -> TanghuluError:
        """Record that the node ``peer`` did not answer in time; return the error for the caller."""
        nodes = self._context.nodes
        failure = silent(peer) if nodes.is_suspect(peer) else error
        nodes.suspect(peer, self._context.clock.now_s())
        return failure

    def tls(self, peer: PeerId) -> TlsFiles:
        """Return the TLS files for connections to ``peer``."""
        return self._settings.master.credentials.tls.to(certificate_roles.MASTER if is_master(peer) else NODE)

    def unreachable(self, peer: PeerId, error: TanghuluError) -> None:
        """Record that connecting to ``peer`` failed."""
        if is_owner(peer):
            return
        self._context.nodes.expire()
        if isinstance(error, PeerSilent) and peer:
            self._context.nodes.note_silent(peer, self._context.clock.now_s())

    def ungreeted(self, peer: PeerId, error: TanghuluError) -> TanghuluError:
        """Return the error for the caller of ``peer``, whose greeting failed."""
        is_silence = isinstance(error, DeadlineExceeded) and not is_master(peer)
        return self.unanswered(peer, error) if is_silence else error

    def take_departed(self) -> list[PeerId]:
        """Close and forget the segments of departed nodes; return the ids of these nodes."""
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
        """Return the open segment of ``node``, or the description of one to open."""
        welcome = self._welcomes.get(node)
        if welcome is None:
            return NodeUnavailable(f"the connection to {node} was lost; try again")
        link = self._links.get((welcome.session, copies))
        return link if link is not None and link.remote.alive else welcome

    def opened(self, welcome: Welcome, copies: bool, remote: RemoteSegment) -> NodeLink:
        """Record that the segment named by ``welcome`` is open."""
        link = self._links[welcome.session, copies] = NodeLink(remote)
        return link

    def close(self) -> None:
        """Forget all segments, as the client is closed."""
        self._links.clear()


def warn_unclosed(client: object) -> None:
    """Warn which client was left open."""
    warnings.warn(f"unclosed {client!r}; call close(), or use it in a with", ResourceWarning, stacklevel=3)


def late_replies(context: Context, peer: PeerId, then: Callable[[], None]) -> LateReplies:
    """Return the handler of replies of ``peer`` that nobody waits for: it returns their leases, then calls ``then``."""

    def give_back(reply: messages.GrantingReply) -> None:
        context.return_granted(peer, reply)
        then()

    return dict.fromkeys(messages.GRANTING, give_back)


def target_of(peer: PeerId, settings: Settings, nodes: NodeTable, now_s: float) -> Target:
    """Return the addresses of the node or owner ``peer``.

    Raises NodeUnavailable for a node that the master does not list, or whose host failed to answer a moment ago.
    """
    if is_owner(peer):
        return Target(owner_address(peer), None, settings.uses_unix)
    node = nodes.get(peer)
    if node is None:
        raise NodeUnavailable(f"node {peer} is not registered at the master; is it running?")
    if nodes.is_silent(peer, now_s):
        raise silent(peer)
    near = settings.uses_unix and node.host_id == settings.host_id and bool(node.unix_path)
    return Target(Address.parse(node.address), node.unix_path if near else None)


def silent(peer: PeerId) -> NodeUnavailable:
    """Return the error for a node that is not called for a while."""
    return NodeUnavailable(f"node {peer} did not answer a moment ago; try again in a few seconds")
