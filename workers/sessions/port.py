"""Interface of sessions to an engine: ``EngineThread`` for ours, ``VllmEngine`` for vLLM's.

All of it is called in the process's event loop, as are the functions passed in, in one order with the reports: the
content of a snapshot was reported before it, and nothing reported after it is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tanghulu.errors import TanghuluError
from tanghulu.hashing import TokenSequence
from tanghulu.session.messages import PullAhead, Submit
from tanghulu.session.outputs import KvSource
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.block_pool import KvEvent
from tanghulu.workers.engine.thread import EngineLoad

RequestT = TypeVar("RequestT")
RequestIn = TypeVar("RequestIn", contravariant=True)
RequestOut = TypeVar("RequestOut", covariant=True)
#: The cached blocks, the load, and unreported events that the blocks already contain.
TakesSnapshot = Callable[[Sequence[BlockHash], EngineLoad, Sequence[KvEvent]], None]


class Beating(Protocol):
    """An engine that can give a sign of life."""

    def beat(self) -> None:
        """Request a report from the engine, whether there is work or not."""


class SessionEngine(Beating, Protocol[RequestIn]):
    """An engine to which sessions give requests."""

    def submit(
        self, request: RequestIn, added: Callable[[int], None], refused: Callable[[TanghuluError], None]
    ) -> None:
        """Begin; then call ``added`` with the number of requests taken by the engine, or ``refused``."""

    def pull_ahead(self, name: RequestId, sequence: TokenSequence, peer: KvSource) -> None:
        """Begin to fetch the KV of a prompt that another worker computes; ``abort`` of ``name`` ends that."""

    def abort(self, request_id: RequestId) -> None:
        """End a request or a fetch, which may have ended already."""

    def snapshot(self, take: TakesSnapshot) -> None:
        """Give ``take`` the blocks that a prompt would find."""


class MakesRequests(Protocol[RequestOut]):
    """Makes an engine's requests from messages."""

    def request(self, submit: Submit) -> RequestOut:
        """Return the request described by ``submit``; raises InvalidRequest if it is not valid."""

    def pulled(self, pull: PullAhead) -> tuple[TokenSequence, KvSource]:
        """Return the prompt named by ``pull``, and where its KV is computed; raises InvalidRequest if impossible."""
