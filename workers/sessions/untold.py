"""What one conductor has not been told yet, and becomes one message however many steps it comes from.

A step's outputs leave at once. But a message costs more than a step of a small batch, so what comes while one is being
written waits for the next, which holds all of it: a conductor that reads slowly gets fewer messages, not later tokens.
Example: three steps of two requests come during a write; the next message has two outputs of three tokens each.

A conductor that has no output in a step hears of the load and the KV events only every ``SPREAD_S``, of all that came
meanwhile in one message: with many conductors each would otherwise read each step of each worker, and more conductors
could carry no more. Example: of eight conductors one has requests at a worker that makes 100 steps a second: it gets
100 messages a second, each of the others 20.

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
from tanghulu.session.outputs import BegunExport, FinishReason, KvChange, KvSource, Output
from tanghulu.types import RequestId
from tanghulu.workers.engine.thread import EngineLoad

#: Between two messages to a conductor that has no output in them.
SPREAD_S = 0.05
#: KV events that wait for the next message at the most.
MAX_UNTOLD_EVENTS = 1024


class Untold:
    """The outputs, KV events and the load for the next message to one conductor.

    ``num_steps`` with outputs are in it. ``num_submits`` have come from the conductor; the load holds the first
    ``_num_taken`` of them. ``added`` has those that the engine took and no load held yet, each with how many requests
    of all sessions it had taken then.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_submits = 0
        self.added: deque[tuple[int, int]] = deque()
        self._num_taken = 0
        self._outputs: dict[RequestId, Output] = {}
        self._refusals: list[Output] = []
        self._begun: list[BegunExport] = []
        self._events: list[KvChange] = []
        self._load: WorkerLoad | None = None
        self._reads: list[PeerRead] = []
        self._next_s = 0.0

    def output(self, output: Output) -> None:
        """Add a request's output of the steps that are noted next; it belongs to this object from now on."""
        known = self._outputs.setdefault(output.request_id, output)
        if known is not output:
            known.add(output)

    def begun(self, request_id: RequestId, source: KvSource) -> None:
        """Add where the KV of a prefill that goes on can be read already."""
        self._begun.append(BegunExport(request_id, source))

    def refusal(self, request_id: RequestId, error: TanghuluError) -> None:
        """Add the end of a request that is not taken."""
        self._refusals.append(Output(request_id, finish=FinishReason.ERROR, failure=Failure.of(error)))

    def steps(
        self,
        num_steps: int,
        events: Sequence[KvChange],
        load: EngineLoad,
        reads: Sequence[PeerRead] = (),
    ) -> None:
        """Add what steps say to all; ``load`` is the last one's, ``reads`` are of all of them."""
        while self.added and self.added[0][0] <= load.num_added:
            self._num_taken = self.added.popleft()[1]
        self.num_steps += num_steps if self._outputs else 0
        self._events += events
        self._load = load.shared
        self._reads += reads

    def snapshot(self) -> None:
        """Forget the events: a snapshot that is told before them holds them."""
        self._events.clear()

    @property
    def is_due(self) -> bool:
        """Whether it is to be told at once: measured reads do not wait either."""
        told_at_once = self._outputs or self._refusals or self._begun or self._reads
        return bool(told_at_once or len(self._events) > MAX_UNTOLD_EVENTS)

    @property
    def due_s(self) -> float:
        """From when on it may be told at once, whatever it is."""
        return self._next_s

    def take(self, sequence: int, now_s: float) -> StepOutput:
        """The message, with all KV events before ``sequence``; nothing is untold then."""
        self._next_s = now_s + SPREAD_S
        load = self._load
        message = StepOutput(
            [*self._outputs.values(), *self._refusals],
            sequence - len(self._events),
            tuple(self._events),
            structs.replace(load, reads=tuple(self._reads)) if load is not None else None,
            self._num_taken,
            tuple(self._begun),
        )
        self.num_steps, self._load = 0, None
        told = (self._outputs, self._refusals, self._begun, self._events, self._reads)
        for each in told:
            each.clear()
        return message
