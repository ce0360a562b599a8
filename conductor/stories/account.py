"""The account of a prompt: runs of tokens that add up to it, each loaded from somewhere or computed for a cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, IntEnum
from typing import Any, Final

from msgspec import Struct, structs

from tanghulu.auth.api_keys import ApiKey, KeyRight
from tanghulu.session.outputs import KvLoad


class Source(Enum):
    """The places of KV that nobody had to compute."""

    WORKER = "the worker's own cache"
    PEER = "another worker"
    STORE = "the memory of the store's nodes"
    SSD = "an SSD of the store's nodes"

    __hash__ = object.__hash__


class Cause(Enum):
    """The causes of computing tokens."""

    NEW = "nobody has requested this prefix before"
    DIVERGED = "it shares a prefix with an earlier prompt, and differs here"
    EVICTED = "it was removed from the cache"
    NOT_KEPT = "it was requested before, and no cache has kept it"
    OTHER_NAME = "the same tokens have another name: of another salt or model"
    LOAD_FAILED = "loading it failed, or was too late"
    NOT_WORTH_FETCHING = "it was elsewhere, and computing was the faster way"
    TAIL = "the last, partial block, which has no name; the last token is always computed"

    __hash__ = object.__hash__


class Audience(IntEnum):
    """The readers of an explanation; each is shown what those before it are.

    A client may infer other clients' prompts from details, so it gets what its own requests and times tell anyway.
    """

    CLIENT = 0
    OPERATOR = 1
    ADMIN = 2

    @classmethod
    def of(cls, key: ApiKey | None, without_keys: Audience) -> Audience:
        """Return the audience with ``key``; None where there are no keys at all."""
        if key is None:
            return without_keys
        return cls.ADMIN if key.may(KeyRight.ADMIN) else cls.OPERATOR if key.may(KeyRight.METRICS) else cls.CLIENT


class Run(Struct, frozen=True, gc=False):
    """``tokens`` of a prompt from number ``start`` on, loaded or computed.

    ``certain`` is False where something that would be needed to know was forgotten, or never known. ``detail`` is for
    everybody, ``load`` from operators on, ``others`` for administrators. Everybody else sees ``instead``, if there is
    one: the run of a conductor that does not know of other clients' prompts.
    """

    start: int
    tokens: int
    why: Source | Cause
    certain: bool = True
    detail: dict[str, Any] = {}
    load: dict[str, Any] = {}
    others: dict[str, Any] = {}
    instead: Run | None = None

    def is_like(self, other: Run) -> bool:
        """Whether only the places of the runs, of the same source or cause, differ."""
        return structs.replace(other, start=self.start, tokens=self.tokens) == self

    def shown(self, audience: Audience) -> dict[str, Any]:
        """Return the run as JSON."""
        head = {"start": self.start, "tokens": self.tokens}
        if isinstance(self.why, Source):
            return head | {"source": self.why.name.lower()}
        detail = dict(self.detail)
        if audience >= Audience.OPERATOR:
            detail |= self.load
        if audience >= Audience.ADMIN:
            detail |= self.others
        return head | {"cause": self.why.name.lower(), "certain": self.certain, "detail": detail}


class Explanation(Struct, frozen=True):
    """The runs of a prompt of ``prompt_tokens`` tokens, in order."""

    prompt_tokens: int
    runs: Sequence[Run]

    def shown(self, audience: Audience) -> dict[str, Any]:
        """Return the explanation as JSON."""
        runs = self.runs
        if audience < Audience.ADMIN:
            runs = _merged(structs.replace(run.instead or run, start=run.start, tokens=run.tokens) for run in runs)
        return {"prompt_tokens": self.prompt_tokens, "runs": [run.shown(audience) for run in runs]}


#: Why the block of a number was computed: a run, whose place does not matter, and the first block with another cause.
CauseOf = Callable[[int], tuple[Run, int]]
#: Beyond any block.
ALL: Final = 1 << 40


def account(num_tokens: int, block_tokens: int, cached: int, loads: Iterable[KvLoad], cause_of: CauseOf) -> Explanation:
    """Account for the ``num_tokens`` of a prompt, of which ``cached`` were not computed, the last ones by ``loads``."""
    loaded = [(load.source, load.tokens) for load in loads if load.tokens > 0]
    own = max(0, cached - sum(tokens for _, tokens in loaded))
    runs: list[Run] = []
    at = 0
    for source, tokens in [("worker", own), *loaded]:
        length = min(tokens, cached - at)
        if length > 0:
            runs.append(Run(at, length, Source[source.upper()]))
            at += length
    named = (num_tokens - 1) // block_tokens * block_tokens
    while at < named:
        run, until = cause_of(at // block_tokens)
        length = min(until * block_tokens, named) - at
        runs.append(structs.replace(run, start=at, tokens=length))
        at += length
    if at < num_tokens:
        runs.append(Run(at, num_tokens - at, Cause.TAIL))
    return Explanation(num_tokens, _merged(runs))


def _merged(runs: Iterable[Run]) -> list[Run]:
    """Return the runs, with neighbours that differ in nothing but their place as one."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and run.is_like(last):
            merged[-1] = structs.replace(last, tokens=last.tokens + run.tokens)
        else:
            merged.append(run)
    return merged
