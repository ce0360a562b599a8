"""Operations on the directory: exists, prefixes, waiting, listings, removal, stat. Pure logic for the drivers.

The master answers calls that wait for others' puts when the keys have been committed, so nothing is polled. A call
waits for a part of the time only; that, a restarting master, and a change of the leader are all handled by calling
again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

import msgspec

from tanghulu.arguments import text, whole
from tanghulu.discovery.masters import ATTEMPT_S
from tanghulu.errors import (
    ChunkNotFound,
    DirectoryIncomplete,
    InvalidRequest,
    MasterUnavailable,
    NodeUnavailable,
    Overloaded,
    TanghuluError,
)
from tanghulu.runtime.clock import Backoff
from tanghulu.store.client.logic import directory_client, messages
from tanghulu.store.client.logic.context import Context, report_reads
from tanghulu.store.client.logic.effects import MASTER, CallPeers, Deadline, Logic, PeerId, Sleep
from tanghulu.store.client.model import KeyInfo, NodeView
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.directory_messages import ListKeysRequest, NodesRequest, WaitRequest
from tanghulu.store.protocol.messages import ChunkInfo, EvictionPolicy, KeysRequest, LocateRequest, RemoveRequest
from tanghulu.store.protocol.types import validate_key
from tanghulu.types import MAX_KEY_BYTES

KEYS_PER_PAGE = 10_000
KEYS_PER_CALL = 8192
#: Keys on a page of a listing.
MAX_LIMIT = 1 << 62
#: match_prefix asks this many keys first, then doubles: short matches stay cheap.
_FIRST_PREFIX_STEP = 1024
#: Part of a waiting call's time reserved for its answer to come back; the master's clock has steps of 0.05 s.
_SLACK_S = 0.1
#: Time before the deadline of the last call to the master, which is answered at once.
_LAST_S = 0.02
#: Wait of one call at one of several owners, of which less than this is spent on a stalled one.
OWNER_WAIT_S = ATTEMPT_S * 2 / 3
#: Pause between two tries while no master answers, or while too many callers wait there.
_WAIT_PAUSE_S, _WAIT_MOST_S = 0.1, 1.0
#: Seconds during which a removal asks the master again about an unreachable holder: a master may be lost with it, and
#: its successor waits for nodes until their leases expire. The first and the longest pause between two tries.
GONE_S = 10.0
_GONE_PAUSE_S, _GONE_MOST_S = 0.02, 0.5


def as_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return ``keys`` as a list; raises InvalidRequest for a single key, whose characters would be taken for keys."""
    if isinstance(keys, list | tuple):
        return keys
    if isinstance(keys, str | bytes | bytearray | memoryview):
        raise InvalidRequest(f"expected a list of keys, not the {type(keys).__name__} {keys!r}; write [{keys!r}]")
    try:
        return list(keys)
    except TypeError:
        raise InvalidRequest(f"expected a list of keys, not {keys!r}") from None


def valid_keys(keys: Sequence[str]) -> Sequence[str]:
    """Return ``keys`` as a list of valid keys, checked at the speed of a few calls; raises InvalidRequest."""
    keys = as_keys(keys)
    with contextlib.suppress(TypeError):  # one of them is not a str: the code below finds out which
        if not keys or ("".join(keys).isascii() and all(keys) and max(map(len, keys)) <= MAX_KEY_BYTES):
            return keys
    for key in keys:
        validate_key(key)
    return keys


def raise_first(outcomes: Sequence[object]) -> None:
    """Raise the first error among ``outcomes``, with a note of their number."""
    errors = [each for each in outcomes if isinstance(each, TanghuluError)]
    if errors:
        if len(outcomes) > 1:
            errors[0].add_note(f"{len(errors)} of {len(outcomes)} failed, the first with this")
        raise errors[0]


def exists(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
    """Return for each key whether a live node holds it, without the location cache."""
    keys = valid_keys(keys)
    found: list[bool] = []
    for start in range(0, len(keys), KEYS_PER_CALL):
        found += yield from _exist(context, deadline, keys[start : start + KEYS_PER_CALL])
    return found


def _exist(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
    backoff, patience = directory_client.rebuilding_backoff(context), directory_client.patience(context, deadline)
    while True:
        reply = yield from directory_client.call_owners(
            context, deadline, methods.LOCATE.call(LocateRequest(keys, True))
        )
        found: list[bool] = reply.message.existence
        incomplete: bool = reply.message.incomplete
        if not incomplete or all(found):
            return found
        pause_s = backoff.pause_s()
        if patience.remaining_s() <= pause_s:
            raise DirectoryIncomplete(
                "the master is rebuilding its directory and does not know all keys yet; try again in a few seconds"
            )
        yield Sleep(pause_s)


def match_prefix(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[int]:
    """Return the number of leading keys that exist without a gap."""
    keys, matched, step = as_keys(keys), 0, _FIRST_PREFIX_STEP
    while matched < len(keys):
        part = keys[matched : matched + step]
        found = yield from exists(context, deadline, part)
        if not all(found):
            return matched + found.index(False)
        matched += len(part)
        step = min(2 * step, KEYS_PER_CALL)
    return matched


def wait_for(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
    """Wait until all of ``keys`` are stored, or until the deadline; return for each whether it is.

    Raises MasterUnavailable or Overloaded if no call was answered.
    """
    keys = valid_keys(keys)
    yield from report_reads(context)
    found: list[bool] = []
    for start in range(0, len(keys), KEYS_PER_CALL):
        found += yield from _wait(context, deadline, keys[start : start + KEYS_PER_CALL])
    return found


def _wait(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
    found: list[bool] | None = None
    backoff = Backoff(_WAIT_PAUSE_S, _WAIT_MOST_S, context.rng)
    while True:
        wait_s = context.wait_s if context.masters.owners is None else min(context.wait_s, OWNER_WAIT_S)
        waiting_s = max(min(deadline.remaining_s(), wait_s) - _SLACK_S, 0.0)
        request = WaitRequest(keys, int(waiting_s * 1000))
        failure: TanghuluError | None = None
        try:
            reply = yield from directory_client.call_owners(context, deadline, methods.WAIT.call(request), waits=False)
        except (MasterUnavailable, Overloaded) as error:
            failure = error
        else:
            found = [byte == 1 for byte in reply.message.found]
            if all(found):
                return found
        left_s = deadline.remaining_s()
        if left_s <= _SLACK_S:
            yield Sleep(left_s - _LAST_S if left_s > _LAST_S else left_s)
            if left_s > _LAST_S:
                continue
            if found is None and failure is not None:
                raise failure
            return found or [False] * len(keys)
        if failure is not None:
            yield Sleep(min(backoff.pause_s(), deadline.remaining_s()))


def list_keys(
    context: Context, deadline: Deadline, prefix: str = "", limit: int | None = None, after: str = ""
) -> Logic[list[KeyInfo]]:
    """Return all keys with ``prefix`` that sort behind ``after``, in order; at most ``limit``."""
    prefix = text("prefix", prefix)
    if after:
        validate_key(after)
    if limit is not None:
        limit = whole("limit", limit, 0, MAX_LIMIT)
    keys: list[KeyInfo] = []
    more = True
    while more and (limit is None or len(keys) < limit):
        page = KEYS_PER_PAGE if limit is None else min(KEYS_PER_PAGE, limit - len(keys))
        got, more = yield from key_page(context, deadline, prefix, after, page)
        keys += got
        after = got[-1].key if got else after
        more = more and bool(got)
    return keys


def key_page(
    context: Context, deadline: Deadline, prefix: str, after: str, limit: int
) -> Logic[tuple[list[KeyInfo], bool]]:
    """Return up to ``limit`` keys with ``prefix`` behind ``after``, in order, and whether there are more."""
    request = ListKeysRequest(prefix, after, limit)
    reply = yield from directory_client.call_owners(context, deadline, methods.LIST_KEYS.call(request))
    return reply.message.keys, reply.message.more


def remove(
    context: Context, deadline: Deadline, keys: Sequence[str], raise_errors: bool = False
) -> Logic[list[bool | TanghuluError]]:
    """Drop the chunks on all their holders; return for each key whether there was one, or its holder's error."""
    keys = as_keys(keys)
    yield from report_reads(context)
    removed: list[bool | TanghuluError] = []
    for start in range(0, len(keys), KEYS_PER_CALL):
        removed += yield from _remove(context, deadline, keys[start : start + KEYS_PER_CALL])
    if raise_errors:
        raise_first(removed)
    return removed


def _remove(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool | TanghuluError]]:
    """``remove`` of some keys. The master is asked again for those whose holder was unreachable.

    A holder may leave between the look-up and the call; then the master no longer names it, and it finds chunks moved
    by a drain elsewhere. A holder still named GONE_S later is the key's outcome.
    """
    removed: list[bool | TanghuluError] = [False] * len(keys)
    left: list[int] = []
    for index, key in enumerate(keys):
        try:
            validate_key(key)
            left.append(index)
        except InvalidRequest as invalid:
            removed[index] = invalid
    backoff, patience = Backoff(_GONE_PAUSE_S, _GONE_MOST_S, context.rng), deadline.within(GONE_S)
    while left:
        unreached = yield from _remove_once(context, deadline, keys, left, removed)
        pause_s = backoff.pause_s()
        if not unreached or patience.remaining_s() <= pause_s:
            for index, error in unreached.items():
                removed[index] = error
            return removed
        left = list(unreached)
        yield Sleep(pause_s)
    return removed


def _remove_once(
    context: Context,
    deadline: Deadline,
    keys: Sequence[str],
    wanted: Sequence[int],
    removed: list[bool | TanghuluError],
) -> Logic[dict[int, NodeUnavailable]]:
    """Drop those of ``keys`` whose indexes are ``wanted``; return those with an unreachable holder.

    ``removed`` takes the answers of the other holders. The holders named are final: once a version has been located for
    removal, the master admits no copy of it, so a copy in progress comes to nothing.
    """
    wanted_keys = [keys[index] for index in wanted]
    holders, incomplete = yield from directory_client.locate(context, deadline, wanted_keys, removing=True)
    if incomplete:
        yield from directory_client.refresh_nodes(context)
    by_node: dict[PeerId, list[int]] = {}
    for index, nodes in zip(wanted, holders, strict=True):
        context.locations.forget(keys[index])
        for node in nodes or (context.nodes.ids() if incomplete else ()):
            by_node.setdefault(node, []).append(index)
    left_ms = deadline.remaining_ms()
    calls = [
        (node, methods.REMOVE.call(RemoveRequest([keys[i] for i in own], left_ms))) for node, own in by_node.items()
    ]
    outcomes = yield CallPeers(calls)
    unreached: dict[int, NodeUnavailable] = {}
    for own, outcome in zip(by_node.values(), outcomes, strict=True):
        if isinstance(outcome, NodeUnavailable):
            context.nodes.expire()
            unreached |= dict.fromkeys(own, outcome)
            continue
        for position, index in enumerate(own):
            if isinstance(outcome, TanghuluError):
                removed[index] = outcome
            elif removed[index] is False:
                removed[index] = bool(outcome.message.found[position])
    return unreached


def remove_matching(context: Context, deadline: Deadline, pattern: str) -> Logic[int]:
    """Remove every key that ``pattern`` (a regular expression) matches anywhere; return their number.

    Raises DirectoryIncomplete while a rebuilding master cannot list all keys.
    """
    if not text("pattern", pattern):
        raise InvalidRequest("an empty pattern would remove every key; to remove them all, give '^'")
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidRequest(f"{pattern!r} is not a regular expression: {error}") from None
    yield from _await_directory(context, deadline)
    listing = yield from list_keys(context, deadline)
    matching = [info.key for info in listing if wanted.search(info.key)]
    outcomes = yield from remove(context, deadline, matching, raise_errors=True)
    return outcomes.count(True)


def _await_directory(context: Context, deadline: Deadline) -> Logic[None]:
    """Wait until the masters know all keys."""
    backoff, patience = directory_client.rebuilding_backoff(context), directory_client.patience(context, deadline)
    while True:
        reply = yield from directory_client.call_owners(context, deadline, methods.NODES.call(NodesRequest()))
        if not reply.message.rebuilding:
            return
        pause_s = backoff.pause_s()
        if patience.remaining_s() <= pause_s:
            raise DirectoryIncomplete(
                "the master is rebuilding its directory and cannot list all keys yet; try again in a few seconds"
            )
        yield Sleep(pause_s)


def stat(context: Context, deadline: Deadline, key: str) -> Logic[ChunkInfo]:
    """Return the store's description of the chunk; raises ChunkNotFound, or DirectoryIncomplete while rebuilding."""
    yield from report_reads(context)
    (nodes,), incomplete = yield from directory_client.locate(context, deadline, [validate_key(key)])
    failure: TanghuluError | None = None
    holders = nodes or (tuple(context.nodes.ids()) if incomplete else ())
    for node in holders:
        patience_s = deadline.remaining_s() / 2 if len(holders) > 1 else None
        (outcome,) = yield CallPeers([(node, methods.CHUNK_STAT.call(KeysRequest([key])))], patience_s)
        if isinstance(outcome, TanghuluError):
            failure = outcome
            continue
        (info,) = outcome.message.chunks
        if info is not None:
            return _located(info, key, nodes or (node,))
    if failure is None and incomplete:
        failure = DirectoryIncomplete(
            f"the master is rebuilding its directory and no node has {key!r} yet; try again in a few seconds"
        )
    raise failure or ChunkNotFound(f"no live node holds {key!r}")


def stat_at(key: str, node: str) -> Logic[ChunkInfo]:
    """Return the description by ``node`` of the chunk; raises ChunkNotFound, or the failure of the call."""
    reply = yield from directory_client.call_one(
        PeerId(node), methods.CHUNK_STAT.call(KeysRequest([validate_key(key)]))
    )
    (info,) = reply.message.chunks
    if info is None:
        raise ChunkNotFound(f"{key!r} is not on {node}")
    return _located(info, key, (node,))


def _located(info: ChunkInfo, key: str, nodes: tuple[str, ...]) -> ChunkInfo:
    return msgspec.structs.replace(info, key=key, nodes=nodes)


def eviction_policy(context: Context, deadline: Deadline, node: str, name: str | None) -> Logic[str]:
    """Return the node's eviction policy, after switching to ``name`` if given."""
    yield from report_reads(context)
    call = methods.EVICTION.call(EvictionPolicy(text("name", name or "")))
    reply = yield from call_node(context, deadline, node, call)
    policy: EvictionPolicy = reply.message
    return policy.name


def call_node(context: Context, deadline: Deadline, node: str, call: messages.AnyCall) -> Logic[messages.AnyReply]:
    """Make one call to the node of that id; raises InvalidRequest if there is none, or the node's typed error."""
    if text("node", node) not in context.nodes.ids():
        known = yield from leaders_nodes(context, deadline)
        if all(view.id != node for view in known):
            raise InvalidRequest(f"there is no node {node!r}; known nodes: {', '.join(v.id for v in known) or 'none'}")
    return (yield from directory_client.call_one(PeerId(node), call))


def leaders_nodes(context: Context, deadline: Deadline) -> Logic[list[NodeView]]:
    """Return all nodes as listed by the leader: one of several masters counts the chunks of its own keys only."""
    reply = yield from directory_client.call_one(MASTER, methods.NODES.call(NodesRequest()))
    return directory_client.take_nodes(context, reply)


def nodes(context: Context, deadline: Deadline, *, waits: bool = True) -> Logic[list[NodeView]]:
    """Request all nodes anew; chunks and drains are counted over all masters. ``waits``: see CallPeers."""
    call = methods.NODES.call(NodesRequest())
    reply = yield from directory_client.call_one(MASTER, call, waits=waits)
    views = directory_client.take_nodes(context, reply)
    if not reply.message.of_part:
        return views
    reply = yield from directory_client.call_each_owner(context, deadline, call, waits=waits)
    counted: list[NodeView] = reply.message.nodes
    return counted
