"""Who has what a get wants: the master is asked once, and again where it may know more a moment later. Pure.

Example: k is being put; the master has been told, and answers whoever waits for k. A get that comes at once is sent to
the node, which has not got k yet. It asks again 0.4 ms later, 0.8, 1.6 and so on; after 3 ms the node has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.errors import DirectoryIncomplete, TanghuluError
from tanghulu.store.client.logic import context as common
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import Deadline, Logic, PeerId, Sleep
from tanghulu.store.client.logic.wants import Want, not_found
from tanghulu.store.protocol.types import RELIED_S

_REBUILDING_PAUSE_S = 0.05
#: For how long holders that the master names are asked again when they have not got the chunk: as long as a putter may
#: take from its word to the master until its node knows. Between two times are so many seconds, at first and at last.
LATE_S = RELIED_S
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.03


def find_holders(context: Context, deadline: Deadline, wants: list[Want]) -> Logic[None]:
    """Give every want a holder that is still to be tried, or its final error."""
    unknown = yield from _still_wanted(context, deadline, wants)
    if not unknown:
        return
    try:
        found, incomplete = yield from common.locate(context, [want.key for want in unknown])
    except TanghuluError as error:
        for want in unknown:
            want.result = error
        return
    for want, nodes in zip(unknown, found, strict=True):
        _take_located(context, want, nodes, incomplete=incomplete)
    yield from _search_everywhere(context, deadline, [want for want in unknown if incomplete and not want.listed])


def _take_located(context: Context, want: Want, nodes: Sequence[PeerId], *, incomplete: bool) -> None:
    want.located, want.listed = True, bool(nodes)
    want.holders = [node for node in nodes if node not in want.tried]
    if nodes:
        context.locations.set(want.key, tuple(nodes))
    elif not incomplete:
        context.locations.forget(want.key)
        want.failure = None  # whoever failed us is no holder any more


def _still_wanted(context: Context, deadline: Deadline, wants: list[Want]) -> Logic[list[Want]]:
    """Those to look up, after a pause if all had been looked up before; the others have their final error."""
    unknown: list[Want] = []
    late: list[Want] = []
    for want in wants:
        if not want.located:
            unknown.append(want)
        elif _may_come(context, deadline, want):
            late.append(want)
        else:
            want.result = want.failure or not_found(want.key)
    if late:
        yield Sleep(min(map(_pause_s, late)))
    for want in late:
        want.come_again()
    return unknown + late


def _may_come(context: Context, deadline: Deadline, want: Want) -> bool:
    """Whether to ask the master and those it names once more: they had not got the chunk, and nothing else is wrong.

    The master hears of a chunk before its node serves it, and of an evicted one after. So who was told that a key is
    there may be faster than its putter; and what is gone the master will not name the next time.
    """
    now_s = context.clock.now_s()
    if not want.num_late:
        want.late_s = now_s
    is_over = now_s - want.late_s > LATE_S or deadline.remaining_s() <= _pause_s(want)
    return want.listed and not want.failure and not is_over


def _pause_s(want: Want) -> float:
    return min(_FIRST_PAUSE_S * (1 << want.num_late), _LAST_PAUSE_S)


def _search_everywhere(context: Context, deadline: Deadline, wants: list[Want]) -> Logic[None]:
    """The master is rebuilding and does not know these keys: ask all nodes, and after a pause the master again."""
    if not wants:
        return
    yield from common.refresh_nodes(context)
    fresh = [w for w in wants if not w.tried]
    for want in fresh:
        want.holders = context.nodes.ids()
        want.located = False
    waiting = [w for w in wants if not w.holders]
    if not waiting:
        return
    if deadline.remaining_s() <= _REBUILDING_PAUSE_S:
        for want in waiting:
            want.result = DirectoryIncomplete(
                f"the master is rebuilding its directory and no node has {want.key!r} yet; try again in a few seconds"
            )
        return
    yield Sleep(_REBUILDING_PAUSE_S)
    for want in waiting:
        want.located = False
        want.tried.clear()
