"""Unsent outputs, KV events and load for one conductor: one message, for any number of steps.

A step's outputs are sent at once. But a message costs more than a step of a small batch, so everything that arrives
while one is being written waits for the next, which holds all of it: a conductor that reads slowly gets fewer messages,
not later tokens. Example: three steps of two requests arrive during a write; the next message has two outputs of three
tokens each.

A conductor without output in a step receives the load and the KV events only every ``SPREAD_S``, all of the interval in
one message: with many conductors each would otherwise read each step of each worker, and more conductors could carry no
more. Example: of eight conductors one has requests at a worker that makes 100 steps a second: it gets 100 messages a
second, each of the others 20.

Pure: time goes in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import structs

from tanghulu.errors import TanghuluError
from tanghulu.rpc.wire import Failure
from tanghulu.session.load import PeerRead, WorkerLoad
from tanghulu.session.messages import StepOutput
from tanghulu.session.outputs import FinishReason, KvChange, Output
from tanghulu.types import RequestId
from tanghulu.workers.engine.thread import EngineLoad

#: Interval of messages to a conductor without output in them.
SPREAD_S = 0.05
#: Most KV events that wait for the next message.
MAX_PENDING_EVENTS = 1024


class SessionOutbox:
    """The outputs, KV events and the load for the next message to one conductor.

    ``num_steps`` with outputs are in it. ``num_submits`` were received from the conductor; the load includes the first
    ``_num_taken`` of them. ``added`` has those taken by the engine that no load includes yet, each with the number of
    requests of all sessions taken by then.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_submits = 0
        self.added: deque[tuple[int, int]] = deque()
        self._num_taken = 0
        self._outputs: dict[RequestId, Output] = {}
        self._refusals: list[Output] = []
        self._events: list[KvChange] = []
        self._load: WorkerLoad | None = None
        self._reads: list[PeerRead] = []
        #: Time from which anything may be sent at once.
        self.due_s = 0.0

    def output(self, output: Output) -> None:
        """Add a request's output of the steps noted next; it belongs to this object from now on."""
        known = self._outputs.setdefault(output.request_id, output)
        if known is not output:
            known.add(output)

    def refusal(self, request_id: RequestId, error: TanghuluError) -> None:
        """Add the end of a refused request."""
        self._refusals.append(Output(request_id, finish=FinishReason.ERROR, failure=Failure.of(error)))

    def steps(
        self,
        num_steps: int,
        events: Sequence[KvChange],
        load: EngineLoad,
        reads: Sequence[PeerRead] = (),
    ) -> None:
        """Add the events and reads of ``num_steps`` steps, and the load after the last of them."""
        while self.added and self.added[0][0] <= load.num_added:
            self._num_taken = max(self._num_taken, self.added.popleft()[1])  # one with a grammar may come late
        self.num_steps += num_steps if self._outputs else 0
        self._events += events
        self._load = load.shared
        self._reads += reads

    def snapshot(self) -> None:
        """Forget the events: the snapshot sent next contains them."""
        self._events.clear()

    @property
    def is_due(self) -> bool:
        """Whether to send at once: measured reads do not wait either."""
        is_urgent = self._outputs or self._refusals or self._reads
        return bool(is_urgent or len(self._events) > MAX_PENDING_EVENTS)

    def take(self, sequence: int, now_s: float) -> StepOutput:
        """Return the message, with all KV events before ``sequence``; the outbox is empty afterwards."""
        self.due_s = now_s + SPREAD_S
        load = self._load
        message = StepOutput(
            [*self._outputs.values(), *self._refusals],
            sequence - len(self._events),
            tuple(self._events),
            structs.replace(load, reads=tuple(self._reads)) if load is not None else None,
            self._num_taken,
        )
        self.num_steps, self._load = 0, None
        for each in (self._outputs, self._refusals, self._events, self._reads):
            each.clear()
        return message
