"""Puts of larger values to a node whose memory is not mapped: one round trip, and the master is asked in its shadow.

    STREAM to the node: the head           (the node wakes, and makes room where the value will lie)
    PROCLAIM to the master                 (whose verdict is not waited for yet)
    checksum
    the value, which the node receives in place
    the master's verdict
    SETTLE to the node, on the same connection: checksum and verdict -> the node answers STREAM

Neither checksum nor announcement is waited for after the last byte, and the node copies nothing: that its head comes
ahead of everything saves it 0.1 ms, and a copy of what else it would find behind the head. The order is safe as
that of desks is: the node serves the chunk as proclaimed only when it has heard that the master has accepted it. If the
client dies in between, the node's connection ends and the value is dropped, and the master takes back its promise.
"""

from __future__ import annotations

import itertools

from tanghulu.errors import TanghuluError
from tanghulu.store.client.logic import messages
from tanghulu.store.client.logic.commit import Question
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import Deadline, Logic, PeerId, Stream
from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol import checksums as sums
from tanghulu.store.protocol.types import LastWord, NewChunk, Verdict

_WORDS = {Verdict.ACCEPTED: LastWord.PROCLAIMED, Verdict.EXISTS: LastWord.DROP, Verdict.ASK_NODE: LastWord.ANNOUNCE}
_stream_ids = itertools.count(1)


class _Putting:
    """What the shell asks for while it streams one value."""

    def __init__(
        self, context: Context, node: PeerId, new: NewChunk, pieces: tuple[memoryview, ...], options: PutOptions
    ) -> None:
        self.stream_id = next(_stream_ids)
        self._node, self._new, self._pieces, self._options = node, new, pieces, options
        self._checksums = new.checksums
        self._generation = 0
        self._question: Question | None = None

    def ask(self, generation: int) -> messages.AnyCall | None:
        """Proclaim it, unless nobody waits for that."""
        self._generation = generation
        if not self._options.visible:
            return None
        self._question = Question(self._node, generation, (self._new,))
        return self._question.call

    def meanwhile(self) -> None:
        """The node makes room: compute the checksum, which also brings the value near."""
        if self._checksums.parts:
            return
        pieces, part_bytes = self._pieces, self._options.part_bytes
        self._checksums = (
            sums.compute(pieces[0], part_bytes) if len(pieces) == 1 else sums.compute_joined(pieces, part_bytes)
        )

    def word(self, outcome: messages.AnyReply | TanghuluError | None) -> messages.AnyCall:
        """The last word, after what the master said."""
        verdict = Verdict.ASK_NODE
        if self._question is not None:
            (verdict,) = self._question.verdicts(outcome)
        return messages.settle(self.stream_id, _WORDS[verdict], self._generation, self._checksums)


def put(
    context: Context,
    deadline: Deadline,
    node: PeerId,
    new: NewChunk,
    pieces: tuple[memoryview, ...],
    options: PutOptions,
) -> Logic[bool | None]:
    """Put ``new`` at ``node``: whether it existed; None: put it in another way, which tells what is wrong."""
    putting = _Putting(context, node, new, pieces, options)
    outcome = yield Stream(
        node,
        messages.stream(
            putting.stream_id,
            new.with_checksums(sums.NO_CHECKSUMS),
            pieces,
            options.visible,
            deadline.remaining_ms(),
        ),
        putting.ask,
        putting.meanwhile,
        putting.word,
        messages.settle(putting.stream_id, LastWord.DROP, 0, sums.NO_CHECKSUMS),
        deadline.remaining_s() / 2,
    )
    if isinstance(outcome, TanghuluError):
        return None
    (result,) = messages.put_results(outcome)
    return None if isinstance(result, TanghuluError) else result
