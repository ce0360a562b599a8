"""Explain the prompts of a conductor's requests: what it asks when one is routed, and concludes when it has ended.

A block that was computed was either never requested before, or something happened to it since: the prompt history
(history.py) tells which, the mirror of all caches who had it when the request was routed, the fates (fates.py) who has
removed it, and the worker's report what it tried to load. The first answer that holds is the cause:

1. Not requested before and held by nobody: DIVERGED if an earlier prompt goes on differently, OTHER_NAME if the same
   tokens were requested under another salt or model, else NEW.
2. The prompt's own log probabilities were requested: NOT_KEPT, as they must be computed.
3. Its load was tried: LOAD_FAILED, or EVICTED if its source has removed it meanwhile.
4. Somebody had it, or was computing it: NOT_WORTH_FETCHING.
5. Somebody has removed it, or has gone away with it: EVICTED, and so are the blocks behind it, which nobody can use.
6. Its first request was aborted or failed: NOT_KEPT. So is what is left, uncertainly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client import Counter as Metric

from tanghulu.conductor.dispatch.dispatcher import Dispatcher
from tanghulu.conductor.dispatch.lifecycle import Flight
from tanghulu.conductor.dispatch.router import RoutedRequest
from tanghulu.conductor.explain.fates import Fate, Fates
from tanghulu.conductor.explain.history import Break, Namespace, PromptHistory, Segment, Use
from tanghulu.conductor.explain.place import place_of
from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.routing.policies.fetching import own_start, starts
from tanghulu.conductor.stories.account import ALL, Cause, Explanation, Run, Source, account
from tanghulu.conductor.text.served_model import ServedModel
from tanghulu.types import BlockHash, InstanceId

#: An earlier prompt with fewer tokens in common, or less than a block, is another prompt altogether; unless it is the
#: client's own and soon goes on like this one, as where a time of day opens the system prompt.
MIN_SHARED: Final = 16
#: Least time between two breaks whose texts are looked at for the dashboard alone.
_LOOK_S: Final = 0.1
#: Kinds and messages of breaks that the dashboard distinguishes.
_MAX_PLACES: Final = 256
_MAX_COUNTERS: Final = 4096
_NOWHERE: Final = ("", 0)


@dataclass(slots=True)
class Plan:
    """The holders of a prompt's blocks, when a worker was chosen: numbers of leading ones.

    ``own`` of the ``worker`` itself; ``source`` those to be loaded from the named worker, or from the store (""); and
    ``elsewhere`` those of whoever has, or is computing, most of them. ``load`` has the policy's two estimates.
    """

    worker: InstanceId
    own: int
    source: tuple[InstanceId | str, int]
    elsewhere: tuple[InstanceId | str, int]
    load: dict[str, Any]

    @property
    def held(self) -> int:
        """Number of leading blocks that somebody had, or was computing."""
        return max(self.own, self.source[1], self.elsewhere[1])


@dataclass(slots=True)
class Asked:
    """A request's prompt as it was when first routed: its ``known`` leading blocks, and where it left earlier ones.

    ``path`` has the worker of the last request for each known segment, and the number of requests. ``fates`` are those
    of blocks that nobody had: later ones are of blocks that this request has computed. ``plan`` was made at ``at_s``,
    when it was last routed.
    """

    names: Sequence[BlockHash]
    known: int
    parting: Break | None
    elsewhere: tuple[Namespace, Segment, int] | None
    path: dict[Segment, tuple[InstanceId, int]]
    added: Segment | None
    plan: Plan
    at_s: float
    fates: dict[int, Fate] = field(default_factory=dict)


@dataclass(slots=True)
class MissTotals:
    """Tokens by source and cause since the start, and of the breaks looked at by (message, kind)."""

    tokens: Counter[Source | Cause] = field(default_factory=Counter)
    places: Counter[tuple[int | None, str]] = field(default_factory=Counter)


class Explainer:
    """See above. No worker has joined ``dispatcher`` yet; without memory the explainer does nothing.

    ``shows_text``: explanations quote the prompts.
    """

    def __init__(self, dispatcher: Dispatcher, max_bytes: int, metrics: ConductorMetrics, *, shows_text: bool) -> None:
        self.history = PromptHistory(max_bytes)
        self.fates = Fates()
        self.totals = MissTotals()
        #: Whether requests may have been served that this conductor has not seen.
        self.misses_requests = False
        self._clock, self._peers, self._shows_text = dispatcher.clock, dispatcher.peers, shows_text
        self._count = metrics.explained_tokens
        self._last_sent: dict[InstanceId, str] = {}
        self._counters: dict[tuple[str, str, Source | Cause], Metric] = {}
        self._look_s = 0.0
        if max_bytes:
            dispatcher.explainer = dispatcher.mirror.watcher = self

    # --- what happens to blocks

    def removed(self, holder: InstanceId, blocks: Iterable[BlockHash], *, is_store: bool) -> None:
        """Record that ``holder`` has removed ``blocks``."""
        request = "" if is_store else self._last_sent.get(holder, "")
        self.fates.removed(blocks, Fate(self._clock.now_s(), holder, is_store, request))

    def gone(self, holder: InstanceId) -> None:
        """Record that ``holder`` went away, or dropped all its blocks."""
        self._last_sent.pop(holder, None)
        self.fates.gone(holder, self._clock.now_s())

    def joined(self, cached: Sequence[BlockHash]) -> None:
        """Record that a worker has joined with ``cached`` blocks: unknown ones are of requests from before."""
        if cached and self.history.segment_of(cached[0]) is None:
            self.misses_requests = True

    # --- requests

    def routed(self, before: Asked | None, flight: Flight, model: ServedModel, route: RoutedRequest) -> Asked:
        """Record that ``flight``, which has not begun, was routed; ``before`` is what was recorded the last time."""
        request = flight.request
        sequence = flight.sequence(lambda: model.empty_sequence(request.salt))
        plan = _plan(route)
        self._last_sent[plan.worker] = request.id
        now_s = self._clock.now_s()
        if before is not None:
            before.plan, before.at_s = plan, now_s
            return before
        names, size, history = tuple(sequence.block_hashes), sequence.block_tokens, self.history
        known = history.num_known(names)
        parting = elsewhere = None
        if known < len(names):
            parting = history.break_of(sequence.root, names[:known], request.prompt, size)
            elsewhere = None if known else history.same_elsewhere(sequence.root, request.prompt, size, request.client)
        last = history.segment_of(names[known - 1]) if known else None
        path = {segment: (segment.worker, segment.uses) for segment in last.path} if last is not None else {}
        added = self.history.add(sequence, self._use(flight, model, plan.worker))
        asked = Asked(names, known, parting, elsewhere, path, added, plan, now_s)
        for block in range(min(plan.held, len(names)), len(names)):
            fate = self.fates.of(names[block])
            if fate is not None:
                asked.fates[block] = fate
            elif block >= known:
                break
        return asked

    def _use(self, flight: Flight, model: ServedModel, worker: InstanceId) -> Use:
        card, request = model.card, flight.request
        namespace = Namespace(card.model, card.fingerprint, request.salt)
        return Use(namespace, request.client, worker, self._clock.now_s())

    def ended(self, asked: Asked, flight: Flight, model: ServedModel, outcome: str) -> Explanation | None:
        """Explain a request that has ended (``outcome`` "" if well); None if its prompt was not computed whole."""
        if asked.added is not None:
            asked.added.outcome = outcome
        if flight.cached_tokens is None:
            return None
        request = flight.request
        sequence = flight.sequence(lambda: model.empty_sequence(request.salt))
        causes = _Causes(asked, flight, model, self, sequence.block_tokens)
        size, prompt = sequence.block_tokens, request.prompt
        explained = account(len(prompt), size, flight.cached_tokens, flight.loads, causes.of)
        if flight.generated and not (asked.added is not None and self.history.extend(asked.added, sequence)):
            self.history.add(sequence, self._use(flight, model, asked.plan.worker), is_answered=True)
        if not outcome:  # what earlier requests have not completed is computed now
            for segment in asked.path:
                segment.outcome = ""
        for run in explained.runs:
            self.totals.tokens[run.why] += run.tokens
            self._counter(model.card.model, request.client, run.why).inc(run.tokens)
        return explained

    def _counter(self, model: str, client: str, why: Source | Cause) -> Metric:
        labels = model, client, why
        counter = self._counters.get(labels)
        if counter is None:
            key = client.removeprefix("key ") if client.startswith("key ") else ""
            counter = self._count.labels(model, key, why.name.lower())
            if len(self._counters) >= _MAX_COUNTERS:  # clients without keys name themselves
                self._counters.clear()
            self._counters[labels] = counter
        return counter

    def looked(self, parting: Break, flight: Flight, model: ServedModel, tokens: int) -> dict[str, Any]:
        """Return the place of a break if it is requested, or its turn has come; ``tokens`` were computed for it."""
        now_s = self._clock.now_s()
        if flight.request.explain is None and now_s < self._look_s and not self._shows_text:
            return {}
        self._look_s = now_s + _LOOK_S
        place = place_of(model, flight.request.prompt, parting.shared, parting.theirs, flight.request.messages)
        what = place["message"], place["kind"]
        if what in self.totals.places or len(self.totals.places) < _MAX_PLACES:
            self.totals.places[what] += tokens
        if not self._shows_text:
            for name in ("before", "ours", "theirs"):
                del place[name]
        return place

    @property
    def knows_all(self) -> bool:
        """Whether no earlier request can be unknown."""
        self.misses_requests = self.misses_requests or bool(self._peers.peers)
        return not self.misses_requests and not self.history.forgotten_s

    @property
    def now_s(self) -> float:
        return self._clock.now_s()

    def summary(self) -> dict[str, Any]:
        """Return the totals for the dashboard: tokens by cause, and those behind breaks by their place, a sample."""
        causes = {why.name.lower(): tokens for why, tokens in self.totals.tokens.items() if isinstance(why, Cause)}
        places = [
            {"message": message, "kind": kind, "tokens": tokens}
            for (message, kind), tokens in self.totals.places.most_common(5)
        ]
        return {"causes": causes, "breaks": places}

    def check(self) -> None:
        self.history.check()


class _Causes:
    """The causes of computing the blocks of one prompt."""

    def __init__(
        self, asked: Asked, flight: Flight, model: ServedModel, explainer: Explainer, block_tokens: int
    ) -> None:
        self._asked, self._flight, self._model = asked, flight, model
        self._explainer, self._size = explainer, block_tokens
        self._now_s = explainer.now_s
        self._evicted_run: Run | None = None  # behind which nothing can be used
        self._new_run: Run | None = None  # shown for what another client had, too

    def of(self, block: int) -> tuple[Run, int]:
        """Return why ``block`` was computed, and the first block with another cause."""
        asked, plan = self._asked, self._asked.plan
        fate = asked.fates.get(block)
        if fate is None and block < plan.held:
            fate = self._removed_meanwhile(block)
        if block >= max(asked.known, plan.held) and fate is None:
            return self._unknown(block)
        scoring = self._flight.request.scoring
        if scoring is not None and block >= (scoring.start - 1) // self._size:
            return _run(Cause.NOT_KEPT, rule="the prompt's log probabilities were requested"), ALL
        return self._missed(block, fate), block + 1

    def _removed_meanwhile(self, block: int) -> Fate | None:
        """Return the removal of a block, since the request was routed, from where it was to be read."""
        asked, plan = self._asked, self._asked.plan
        holder = plan.worker if block < plan.own else plan.source[0]
        fate = self._explainer.fates.of(asked.names[block])
        if fate is None or fate.at_s < asked.at_s:
            return None
        return fate if fate.holder == holder or (fate.is_store and not holder) else None

    def _unknown(self, block: int) -> tuple[Run, int]:
        """Return why a block that nobody had requested was computed."""
        asked, request = self._asked, self._flight.request
        if asked.elsewhere is not None and block < asked.elsewhere[2]:
            namespace, segment, num_blocks = asked.elsewhere
            own = Namespace(self._model.card.model, self._model.card.fingerprint, request.salt)
            differs = [name for name in Namespace._fields if getattr(own, name) != getattr(namespace, name)]
            if segment.client != request.client:
                self._new_run = self._new(block)
            certain = self._explainer.knows_all
            return Run(0, 0, Cause.OTHER_NAME, certain, {"differs": differs}, instead=self._new_run), num_blocks
        return self._new_run or self._new(block), ALL

    def _new(self, block: int) -> Run:
        """Return the run of blocks that are new under their name."""
        explainer, parting = self._explainer, self._asked.parting
        certain, client = explainer.knows_all, self._flight.request.client
        if parting is None or parting.continues:
            return Run(0, 0, Cause.NEW, certain)
        is_own, prompt = parting.other.client == client, self._flight.request.prompt
        is_alike = parting.shared >= min(self._size, MIN_SHARED) or (is_own and parting.resumes(prompt))
        if not is_alike:
            return Run(0, 0, Cause.NEW, certain)
        tokens = len(prompt) - block * self._size
        place = {"token": parting.shared} | explainer.looked(parting, self._flight, self._model, tokens)
        detail = {"block": parting.shared // self._size}
        if is_own:
            return Run(0, 0, Cause.DIVERGED, certain, detail | place)
        return Run(0, 0, Cause.DIVERGED, certain, detail, others=place)

    def _missed(self, block: int, fate: Fate | None) -> Run:
        """Return why a block that was requested before, or that somebody had, was computed."""
        plan, loads = self._asked.plan, self._flight.loads
        segment = self._explainer.history.segment_of(self._asked.names[block])
        failed = next((load for load in loads if load.error), None)
        if block < plan.source[1] and block >= plan.own:
            if failed is not None:
                return _run(Cause.LOAD_FAILED, source=failed.source, error=failed.error)
            return self._evicted(fate, segment) if fate is not None else self._vanished(plan.source[0])
        if block < plan.own:
            return self._evicted(fate, segment) if fate is not None else self._vanished(plan.worker)
        if block < plan.elsewhere[1]:
            where, num_blocks = plan.elsewhere
            load = {"holder": where, **plan.load}
            return Run(0, 0, Cause.NOT_WORTH_FETCHING, True, {"tokens": num_blocks * self._size}, load)
        gone = self._gone(segment, fate.at_s if fate is not None else 0.0)
        if fate is None and segment is not None and segment.outcome:
            rule = f"the request that was to compute it has {segment.outcome}"
            return Run(0, 0, Cause.NOT_KEPT, gone is None, {"rule": rule})  # a part may have gone with its worker
        if gone is not None:
            return gone
        if fate is not None:
            return self._evicted(fate, segment)
        return self._evicted_run or Run(0, 0, Cause.NOT_KEPT, False, {"rule": "no cache has reported it"})

    def _evicted(self, fate: Fate, segment: Segment | None) -> Run:
        detail: dict[str, Any] = {
            "where": fate.holder,
            "tier": "store" if fate.is_store else "worker",
            "seconds_ago": round(self._now_s - fate.at_s, 3),
        }
        if segment is not None:
            _, uses = self._asked.path.get(segment, ("", segment.uses))
            detail |= {"age_s": round(max(0.0, fate.at_s - segment.first_s), 3), "uses": uses}
        others = {"pressure": fate.request} if fate.request else {}
        self._evicted_run = Run(0, 0, Cause.EVICTED, True, detail, others=others)
        return self._evicted_run

    def _vanished(self, holder: InstanceId | str) -> Run:
        """Return the cause of a block that was not where it was said to be."""
        if self._evicted_run is not None:
            return self._evicted_run
        gone_s = self._explainer.fates.gone_s(InstanceId(holder))
        if gone_s is not None and gone_s >= self._asked.at_s:
            return _went_away(holder, self._now_s - gone_s)
        return Run(0, 0, Cause.LOAD_FAILED, False, {"source": holder or "store", "error": "NOT_FOUND"})

    def _gone(self, segment: Segment | None, since_s: float) -> Run | None:
        """Return the cause of a block whose worker went away after ``since_s``; None if it did not."""
        if segment is None:
            return None
        worker, _ = self._asked.path.get(segment, (segment.worker, 0))
        gone_s = self._explainer.fates.gone_s(worker)
        if gone_s is None or not max(since_s, segment.first_s) <= gone_s <= self._asked.at_s:
            return None
        return _went_away(worker, self._now_s - gone_s)


def _run(cause: Cause, **detail: Any) -> Run:
    return Run(0, 0, cause, True, detail)


def _went_away(holder: InstanceId | str, ago_s: float) -> Run:
    return _run(Cause.EVICTED, where=holder, tier="worker", seconds_ago=round(ago_s, 3), why="it went away")


def _plan(route: RoutedRequest) -> Plan:
    """Return what ``route`` knew and decided."""
    decision, hits, request = route.decision, route.hits, route.request
    assert decision is not None
    chosen = next(w for w in route.workers if w.id == decision.prefill)
    own = hits.workers.get(chosen.id, 0)
    source: tuple[InstanceId | str, int] = route.holder or _NOWHERE
    if hits.store > max(own, source[1]):
        source = "", hits.store
    others: list[tuple[InstanceId | str, int]] = [*route.coming.items(), *hits.workers.items(), ("store", hits.store)]
    elsewhere = max(others, key=lambda each: each[1])
    if elsewhere[1] <= max(own, source[1]):
        return Plan(chosen.id, own, source, _NOWHERE, {})
    here_s = own_start(request, chosen).ttft_s
    holder = next((w for w in route.workers if w.id == elsewhere[0]), None)
    ways = [start.ttft_s for start in starts(request, chosen, holder)[1:]]
    if holder is not None and not ways:
        ways = [own_start(request, holder).ttft_s]
    load = {"here_s": round(here_s, 4)} | ({"there_s": round(min(ways), 4)} if ways else {})
    return Plan(chosen.id, own, source, elsewhere, load)
