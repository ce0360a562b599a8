"""The load of one worker as known to the conductor: its last report, plus work not yet included in a report.

Pure. A submission counts as load from the moment it is sent until a report includes it: at the first output for that
submission, or at a report covering the submission's number. Without a number (another conductor's submission) it is the
second report after it, as the first may have crossed it on the wire. A decode slot reserved for a request prefilled
elsewhere counts until the request arrives or is withdrawn. Blocks that answers in progress will still fill are not in
use, but not free either (expected_output.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tanghulu.conductor.routing.kind import KindOfWorkers
from tanghulu.conductor.routing.policies.base import WorkerView
from tanghulu.conductor.routing.profiles import NOTHING_KNOWN
from tanghulu.session.load import PrefillProfile, WorkerLoad
from tanghulu.types import InstanceId, Place, Role

_REPORTS_UNTIL_SEEN = 2
#: Views of one worker that are cached while nothing changes.
MAX_VIEWS = 16


@dataclass(slots=True)
class _Unreported:
    prefill_tokens: int
    prefill_pairs: int
    num_blocks: int
    reports_left: int = _REPORTS_UNTIL_SEEN
    number: int | None = None


def _nobody(number: int) -> None:
    """Ignore the change: there is no watcher."""


class LoadTracker:
    """One worker's load, as presented to routing."""

    def __init__(self) -> None:
        self.reported = WorkerLoad()
        #: Assumed profiles of the worker until it reports its own.
        self.known = NOTHING_KNOWN
        #: Workers like this one, whose median is used for anything missing from both of these.
        self.kind = KindOfWorkers()
        #: The worker decodes what it prefills, and nothing else.
        self.keeps_requests = False
        #: Tokens per block of the model it serves; 0 while unknown.
        self.block_tokens = 0
        #: Blocks that answers in progress are still expected to fill.
        self.expected_blocks = 0
        self._unreported: dict[str, _Unreported] = {}
        self._reserved: dict[str, int] = {}
        #: Sort key of workers by load: waiting tokens, then requests. An attribute, because thousands are sorted by it.
        self.pressure = 0.0
        self._queue_tokens = self._queue_pairs = self._num_requests = self._blocks_free = 0
        #: View of the worker holding none of a prompt, the usual case; None if it must be rebuilt.
        self.unhit: WorkerView | None = None
        self._views: dict[tuple[int, int], WorkerView] = {}
        self._role, self._place, self._phases = Role.BOTH, Place(), (True, True)
        self._stale: tuple[set[int], int] = (set(), 0)
        self._refresh: Callable[[int], None] = _nobody

    def sent(self, wire_id: str, prefill_tokens: int, num_blocks: int) -> None:
        """Count a sent submission; ``prefill_tokens`` of it are expected to be computed there."""
        num_tokens = max(prefill_tokens, num_blocks * self.block_tokens)
        prefill_pairs = num_tokens**2 - (num_tokens - prefill_tokens) ** 2
        self._unreported[wire_id] = _Unreported(prefill_tokens, prefill_pairs, num_blocks)
        self._changed()

    def numbered(self, wire_id: str, number: int) -> None:
        """Record the number by which the worker's reports will refer to a submission."""
        if (sent := self._unreported.get(wire_id)) is not None:
            sent.number = number

    def on_report(self, wire_id: str) -> None:
        """Stop counting a submission: the worker reported on it, or it was withdrawn."""
        if self._unreported.pop(wire_id, None) is not None:
            self._changed()

    def report(self, load: WorkerLoad, taken: int | None = None) -> None:
        """Apply a report, which includes the submissions up to the number ``taken`` if that is known."""
        self.reported = load
        for wire_id, entry in list(self._unreported.items()):
            if taken is None or entry.number is None:
                entry.reports_left -= 1
                seen = entry.reports_left <= 0
            else:
                seen = entry.number <= taken
            if seen:
                del self._unreported[wire_id]
        self._changed()
        self._refresh(self._stale[1])

    def reserve_decode(self, key: str, num_blocks: int) -> None:
        """Reserve a decode slot and ``num_blocks`` for a request prefilled elsewhere."""
        self._reserved[key] = num_blocks
        self._changed()

    def release_decode(self, key: str) -> None:
        """End a reservation: the request arrived, or will not; no error if already ended."""
        if self._reserved.pop(key, None) is not None:
            self._changed()

    def expect(self, num_blocks: int) -> None:
        """Expect answers to fill ``num_blocks`` more than before, or less if negative."""
        if num_blocks:
            self.expected_blocks += num_blocks
            self.renew()

    def reset(self, load: WorkerLoad) -> None:
        """Restart with no work in progress: the worker has a new session."""
        self._unreported.clear()
        self._reserved.clear()
        self.reported = load
        self._changed()

    def view(
        self, worker: InstanceId, role: Role, hit_blocks: int, coming_blocks: int = 0, place: Place = Place()
    ) -> WorkerView:
        """Return the view for a policy. Views are cached until a change: many prompts share a prefix or hit nothing."""
        if role is not self._role or place is not self._place:
            self.renew()
            self._role, self._place, self._phases = role, place, (role.prefills, role.decodes)
        key = (hit_blocks, coming_blocks)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_VIEWS:
                self.renew()
            view = self._views[key] = self._view(worker, hit_blocks, coming_blocks)
            if not (hit_blocks or coming_blocks):
                self.unhit = view
        return view

    def renew(self) -> None:
        """Rebuild the views: the worker's role or place may have changed."""
        self._views.clear()
        self.unhit = None
        stale, number = self._stale
        stale.add(number)

    def watch(self, stale: set[int], number: int, refresh: Callable[[int], None] = _nobody) -> None:
        """From now on, put ``number`` into ``stale`` whenever a view must be rebuilt, and call ``refresh`` with it
        after each report; there is only one such set.
        """
        self._stale, self._refresh = (stale, number), refresh

    def show(self, view: WorkerView) -> None:
        """Update ``view``, of this worker, to its load; its blocks of a prompt stay."""
        load, typical = self.reported, self.kind.typical
        view.queue_tokens, view.num_requests, view.blocks_free = (
            self._queue_tokens,
            self._num_requests,
            max(0, self._blocks_free - self.expected_blocks),
        )
        view.blocks_total, view.store_bytes_per_s = load.blocks_total, load.store_bytes_per_s
        view.peer_bytes_per_s = load.peer_bytes_per_s
        view.prefill_tokens_per_s, view.profile = load.prefill_tokens_per_s, load.prefill or self.known.prefill
        if not view.prefill_tokens_per_s and view.profile is None:
            view.prefill_tokens_per_s, view.profile = typical.prefill_tokens_per_s, typical.prefill
        view.decode_step_s, view.decode_profile = load.decode_step_s, load.decode or self.known.decode
        if not view.decode_step_s and view.decode_profile is None:
            view.decode_step_s, view.decode_profile = typical.decode_step_s, typical.decode
        view.max_num_seqs, view.prefill_share = load.max_num_seqs, load.prefill_share
        view.num_waiting, view.keeps_requests = load.num_waiting + len(self._unreported), self.keeps_requests
        view.active_blocks = max(0, load.blocks_total - self._blocks_free)
        view.context_tokens = view.active_blocks * self.block_tokens
        view.coming_requests = len(self._reserved)
        view.queue_s = self._queue_s(view.profile)
        view.derive()

    def _queue_s(self, profile: PrefillProfile | None) -> float | None:
        """Return seconds of the waiting prompts, by their own lengths; None if only their tokens are known."""
        load = self.reported
        if profile is None or (load.prefill_tokens_waiting and not load.prefill_pairs_waiting):
            return None
        num_prompts = load.num_waiting + len(self._unreported)
        return profile.queue_seconds(num_prompts, self._queue_tokens, self._queue_pairs)

    def _view(self, worker: InstanceId, hit_blocks: int, coming_blocks: int) -> WorkerView:
        prefills, decodes = self._phases
        view = WorkerView(
            worker, prefills, decodes, hit_blocks=hit_blocks, coming_blocks=coming_blocks, place=self._place
        )
        self.show(view)
        return view

    def _changed(self) -> None:
        load, own = self.reported, self._unreported.values()
        self._queue_tokens, self._blocks_free = load.prefill_tokens_waiting, load.blocks_free
        self._queue_pairs = load.prefill_pairs_waiting
        self._num_requests = load.num_running + load.num_waiting
        if own:
            self._queue_tokens += sum([e.prefill_tokens for e in own])
            self._queue_pairs += sum([e.prefill_pairs for e in own])
            self._blocks_free = max(0, load.blocks_free - sum([e.num_blocks for e in own]))
            self._num_requests += len(own)
        if self._reserved:
            self._blocks_free = max(0, self._blocks_free - sum(self._reserved.values()))
            self._num_requests += len(self._reserved)
        self.pressure = self._queue_tokens + self._num_requests / 1024
        self.renew()

    def check(self) -> None:
        expected = self.reported.prefill_tokens_waiting + sum(e.prefill_tokens for e in self._unreported.values())
        assert self._queue_tokens == expected
        assert len(self._views) <= MAX_VIEWS
        assert self.expected_blocks >= 0
        assert all(0 < e.reports_left <= _REPORTS_UNTIL_SEEN for e in self._unreported.values())


class Viewed(Protocol):
    """A worker, as needed by ``views``."""

    @property
    def id(self) -> InstanceId: ...

    @property
    def role(self) -> Role: ...

    @property
    def place(self) -> Place: ...

    @property
    def load(self) -> LoadTracker: ...


def views(
    workers: Iterable[Viewed], hits: Mapping[InstanceId, int], coming: Mapping[InstanceId, int]
) -> list[WorkerView]:
    """Return a view of each of ``workers``, with its present and coming blocks of a prompt."""
    shown = []
    for worker in workers:
        view = worker.load.unhit
        if view is None or view.id in hits or view.id in coming:
            id = worker.id
            view = worker.load.view(id, worker.role, hits.get(id, 0), coming.get(id, 0), worker.place)
        shown.append(view)
    return shown
