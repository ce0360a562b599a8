"""Waiting for keys that somebody else will put. Pure logic for the shells.

The master answers when the keys have been announced, so nothing is polled. A call waits for a part of the time only;
that, a master that restarts, and another one that leads are all met by asking again.
"""

from __future__ import annotations

from collections.abc import Sequence

from tanghulu.errors import MasterUnavailable, Overloaded, TanghuluError
from tanghulu.protos import directory_pb2
from tanghulu.store.client.logic import context as common
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import MASTER, Ask, Deadline, Logic, Sleep
from tanghulu.store.client.logic.query import KEYS_PER_CALL
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.types import validate_keys

#: What is left of a call's time for its answer to come back; the master counts its time in steps of 0.05 s.
_SLACK_S = 0.1
#: Between two tries while no master answers, or while too many wait there.
_PAUSE_S = 0.1


def wait_for(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
    """Wait until all of ``keys`` are stored, or until the deadline; for each whether it is there.

    Raises MasterUnavailable or Overloaded if it was never answered.
    """
    validate_keys(keys)
    yield from common.tell_reads(context)
    found: list[bool] = []
    for start in range(0, len(keys), KEYS_PER_CALL):
        found += yield from _wait(context, deadline, keys[start : start + KEYS_PER_CALL])
    return found


def _wait(context: Context, deadline: Deadline, keys: Sequence[str]) -> Logic[list[bool]]:
    found: list[bool] | None = None
    while True:
        call_s = min(deadline.remaining_s(), context.wait_s)
        waiting_s = max(call_s - _SLACK_S, 0.0)
        request = directory_pb2.WaitRequest(keys=keys, deadline_ms=int(waiting_s * 1000))
        (outcome,) = yield Ask([(MASTER, methods.WAIT.call(request))])
        failure = outcome if isinstance(outcome, TanghuluError) else None
        if failure is not None and not isinstance(failure, MasterUnavailable | Overloaded):
            raise failure
        if failure is None:
            found = [byte == 1 for byte in outcome.message.found]
            if all(found):
                return found
        if deadline.remaining_s() <= _SLACK_S:
            if found is None and failure is not None:
                raise failure
            return found or [False] * len(keys)
        if failure is not None:
            yield Sleep(_PAUSE_S)
