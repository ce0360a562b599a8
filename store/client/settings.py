"""A client's settings, checked once."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field

from tanghulu.arguments import above_zero, text
from tanghulu.discovery.masters import ATTEMPT_S
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.masters import Masters
from tanghulu.runtime.process import host_id
from tanghulu.types import Place

DEFAULT_DEADLINE_S = 5.0
WAIT_S = 10.0
#: ``master_answer_s`` of an engine or a worker, which computes what it cannot look up.
ENGINE_ANSWER_S = 1.0
TRANSPORTS = ("shm", "ucx", "tcp")

#: Longer deadlines, and infinite ones, are reduced to this; nodes refuse longer ones.
MAX_DEADLINE_S = 24 * 3600.0
#: Time of a call that is not to wait: its answer still has to arrive.
AT_ONCE_S = 0.05


def deadline_seconds(seconds: float) -> float:
    """Return a caller's deadline; raises InvalidRequest unless it is a number above 0."""
    return min(above_zero("deadline_s", seconds), MAX_DEADLINE_S)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See ``tanghulu.connect``.

    ``master_answer_s``: seconds for one answer of the master, for callers that prefer doing without the store to
    waiting: engines and workers. They do not wait either for a master that is away, or rebuilding its directory.

    ``client_id`` identifies this client to the nodes; it cannot be guessed.
    """

    master: Masters  # and the credentials to present there
    transport: str | None = None
    deadline_s: float = DEFAULT_DEADLINE_S
    place: str = ""
    master_answer_s: float = math.inf
    client_id: str = field(default_factory=lambda: secrets.token_hex(16))
    host_id: str = field(default_factory=host_id)

    def __post_init__(self) -> None:
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise InvalidRequest(f"transport {self.transport!r} is unknown; known: {', '.join(TRANSPORTS)}, or None")
        object.__setattr__(self, "deadline_s", deadline_seconds(self.deadline_s))
        above_zero("master_answer_s", self.master_answer_s)
        if self.place:
            Place.parse(text("place", self.place))

    def deadline_of(self, seconds: float | None) -> float:
        """Return the time of a call with a deadline of ``seconds``; 0 does not wait. Raises InvalidRequest."""
        if seconds is None:
            return self.deadline_s
        return AT_ONCE_S if seconds == 0 else deadline_seconds(seconds)

    @property
    def waits_for_master(self) -> bool:
        """Whether calls wait, up to their deadlines, for a master that is away or does not know all keys yet."""
        return math.isinf(self.master_answer_s)

    @property
    def uses_unix(self) -> bool:
        """Whether nodes of this host are reached through their Unix sockets."""
        return self.transport not in ("ucx", "tcp")

    @property
    def streams(self) -> bool:
        """Whether values may travel inside messages longer than an inline value."""
        return self.transport != "ucx"

    @property
    def engine_transports(self) -> tuple[str, ...]:
        """Transports for the transfer engine; copies through the node need tcp beside shm."""
        return (self.transport,) if self.transport in ("ucx", "tcp") else ("shm", "tcp")

    @property
    def wait_s(self) -> float:
        """Seconds that one call may wait at the master; with several masters, less than the wait for any of them."""
        call_s = min(self.master_answer_s, ATTEMPT_S if self.master.several else math.inf)
        return WAIT_S if math.isinf(call_s) else call_s * 2 / 3

    def carrier(self, copies: bool) -> str | None:
        """Return the engine's transport for opening a segment; ``copies``: the node refuses the use of its mapping."""
        return "tcp" if copies and self.transport != "ucx" else self.transport


def not_a_master(masters: Masters, error: TanghuluError) -> TanghuluError:
    """Return the error for a failed first call, a request to the master that every master answers."""
    if type(error) is not InvalidRequest:
        return error
    return InvalidRequest(
        f"{masters} is not a master (a store node, or an HTTP port?): {error.message}; give the master's address"
    )
