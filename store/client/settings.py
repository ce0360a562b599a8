"""What a client was opened with; checked once."""

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

#: Longer deadlines, and infinite ones, are taken for this; nodes refuse longer ones.
MAX_DEADLINE_S = 24 * 3600.0
#: What a call may take that is not to wait: its answer has to come all the same.
AT_ONCE_S = 0.05


def deadline_seconds(seconds: float) -> float:
    """A caller's deadline; raises InvalidRequest unless it is a number above 0."""
    return min(above_zero("deadline_s", seconds), MAX_DEADLINE_S)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """See ``tanghulu.connect``.

    ``master_answer_s``: what one answer of the master may take, for callers that would rather do without the store than
    wait: engines and workers. They do not wait either for a master that is away, or is learning what its nodes hold.

    ``client_id`` names this client to the nodes; nobody can guess it.
    """

    master: Masters  # and what to show there
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
        """The time of a call whose caller said ``seconds``; 0 does not wait. Raises InvalidRequest."""
        if seconds is None:
            return self.deadline_s
        return AT_ONCE_S if seconds == 0 else deadline_seconds(seconds)

    @property
    def waits_for_master(self) -> bool:
        """Whether calls wait, up to their deadlines, for a master that is away or does not know all keys yet."""
        return math.isinf(self.master_answer_s)

    @property
    def uses_unix(self) -> bool:
        """Whether nodes of this host are reached by their Unix socket."""
        return self.transport not in ("ucx", "tcp")

    @property
    def streams(self) -> bool:
        """Whether values may travel inside messages that are longer than an inline value."""
        return self.transport != "ucx"

    @property
    def engine_transports(self) -> tuple[str, ...]:
        """What the transfer engine may use; copies through the node need tcp beside shm."""
        return (self.transport,) if self.transport in ("ucx", "tcp") else ("shm", "tcp")

    @property
    def wait_s(self) -> float:
        """How long one call may wait at the master; of several, less than any of them is waited for."""
        call_s = min(self.master_answer_s, ATTEMPT_S if self.master.several else math.inf)
        return WAIT_S if math.isinf(call_s) else call_s * 2 / 3

    def carrier(self, copies: bool) -> str | None:
        """What the engine is asked to open a segment by; ``copies``: the node wants its mapping left alone."""
        return "tcp" if copies and self.transport != "ucx" else self.transport


def not_a_master(asked: Masters, error: TanghuluError) -> TanghuluError:
    """What the failure of a client's first question says: it is for the master, and every master answers it."""
    if type(error) is not InvalidRequest:
        return error
    return InvalidRequest(
        f"what listens at {asked} is no master (a store node, or an HTTP port?); connect to the master: {error.message}"
    )
