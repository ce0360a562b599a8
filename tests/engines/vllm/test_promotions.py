"""Loads of waiting requests: every request is admitted in the end, however little room there is.

The other side is a model of vLLM's host memory and scheduler: it evicts the row loaded first, and pins the rows of
admitted requests.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tanghulu.engines.vllm.tier_jobs import MAX_LOADS, Promotions


@dataclass
class Request:
    name: str
    keys: range
    looked_up: set[int] = field(default_factory=set)
    admitted_with: list[int] | None = None
    unpinned_at: int = 0


class Host:
    """Host memory with ``num_rows`` rows above a store that has every key below ``num_stored``."""

    def __init__(self, num_rows: int, num_stored: int, random: Random | None = None) -> None:
        self.promotions = Promotions(num_rows)
        self.requests: list[Request] = []
        self._num_rows, self._stored, self._random = num_rows, set(range(num_stored)), random
        self._ready: list[int] = []  # the oldest first
        self._pins: defaultdict[int, int] = defaultdict(int)
        self._pending: dict[int, int] = {}  # the step at which a row is loaded
        self._placed: dict[str, list[int]] = defaultdict(list)
        self.now, self.num_loads = 0, 0

    def request(self, keys: range) -> Request:
        request = Request(f"r{len(self.requests)}", keys)
        self.requests.append(request)
        self.promotions.begin(request.name)
        return request

    def preempt(self, request: Request) -> None:
        if request.unpinned_at > self.now:
            self._unpin(request)
        request.admitted_with = None
        self._end_step([request.name])

    def step(self, max_admitted: int = 1 << 30) -> None:
        """Each waiting request looks for its prefix, the oldest first, and is admitted if nothing is pending."""
        self.now += 1
        self._finish_loads()
        admitted = []
        for request in self.requests:
            if request.admitted_with is not None:
                if request.unpinned_at == self.now:
                    self._unpin(request)
            elif (found := self._leading(request)) is not None and len(admitted) < max_admitted:
                request.admitted_with = found
                request.unpinned_at = self.now + self._number(1, 3)
                for key in found:
                    self._pins[key] += 1
                admitted.append(request.name)
        self._end_step(admitted)

    def until_admitted(self) -> None:
        while any(request.admitted_with is None for request in self.requests):
            assert self.now < 500, "a request waits for ever"
            self.step()

    def _leading(self, request: Request) -> list[int] | None:
        waits, found = False, []
        for key in request.keys:
            result = self._look_up(request, key)
            if result == "miss":
                break
            waits |= result != "hit"
            found.append(key)
        return None if waits else found

    def _look_up(self, request: Request, key: int) -> str:
        if key in self._ready:
            return "hit"
        if key in self._pending:
            return "pending"
        if not self.promotions.allows(request.name, key):
            return "miss"
        if key not in request.looked_up:
            request.looked_up.add(key)
            return "retry"
        if key not in self._stored:
            return "miss"
        self.promotions.offer(request.name, key)
        return "pending" if self._place(request, key) else "miss"

    def _place(self, request: Request, key: int) -> bool:
        if len(self._ready) + len(self._pending) == self._num_rows:
            evictable = [each for each in self._ready if not self._pins[each]]
            if not evictable:
                return False
            self._ready.remove(evictable[0])
        self._pending[key] = self.now + self._number(1, 3)
        self._placed[request.name].append(key)
        return True

    def _finish_loads(self) -> None:
        for key in [key for key, at in self._pending.items() if at <= self.now]:
            del self._pending[key]
            if self._number(0, 99):  # else it is lost, and the store finds it no more
                self._ready.append(key)
            else:
                self._stored.discard(key)

    def _end_step(self, anew: list[str]) -> None:
        for name, keys in self._placed.items():
            self.promotions.load(name, keys)
            self.num_loads += len(keys)
        self._placed.clear()
        self.promotions.end_step(anew)
        self.promotions.check()

    def _unpin(self, request: Request) -> None:
        for key in request.admitted_with or ():
            self._pins[key] -= 1

    def _number(self, low: int, high: int) -> int:
        return self._random.randint(low, high) if self._random else 1


@pytest.mark.parametrize(("num_rows", "num_stored"), [(4, 10), (4, 4), (4, 2), (1, 10)])
def test_a_prefix_beyond_host_memory_is_loaded_as_far_as_it_fits(num_rows: int, num_stored: int) -> None:
    host = Host(num_rows, num_stored)
    request = host.request(range(12))
    host.until_admitted()
    assert request.admitted_with == list(range(min(num_rows, num_stored)))
    assert host.num_loads == len(request.admitted_with), "nothing was loaded in vain"


def test_what_is_known_at_once_is_not_evicted_by_what_is_found_later() -> None:
    host = Host(4, 10)
    request = host.request(range(12))
    request.looked_up |= {0, 1}  # by another request with the same beginning
    host.until_admitted()
    assert (request.admitted_with, host.num_loads) == ([0, 1, 2, 3], 4)


def test_what_others_evicted_is_loaded_again_but_not_for_ever() -> None:
    promotions = Promotions(8)
    promotions.begin("r")
    for _ in range(MAX_LOADS):
        assert promotions.allows("r", 1)
        promotions.offer("r", 1)
        promotions.load("r", [1])
        promotions.end_step([])
    assert not promotions.allows("r", 1)
    promotions.end_step(["r"])
    assert promotions.allows("r", 1), "preempted: it waits anew"


def test_a_chunk_without_room_is_not_offered_again() -> None:
    promotions = Promotions(8)
    promotions.begin("r")
    promotions.offer("r", 1)
    assert promotions.allows("r", 1), "in the same step"
    promotions.end_step([])
    assert not promotions.allows("r", 1)
    assert promotions.allows("r", 2)


def test_a_request_that_ended_leaves_nothing() -> None:
    promotions = Promotions(1)
    promotions.begin("r")
    promotions.offer("r", 1)
    promotions.end("r")
    promotions.load("r", [1])  # submitted at the end of the step in which the request was aborted
    promotions.offer("r", 2)
    promotions.end_step(["r"])
    assert len(promotions) == 0
    promotions.check()


def test_a_preempted_request_loads_its_prefix_again() -> None:
    host = Host(4, 10)
    first = host.request(range(4))
    host.until_admitted()
    host.step()
    second = host.request(range(5, 9))
    host.until_admitted()
    assert second.admitted_with == [5, 6, 7, 8], "in place of the first one's"
    host.step()
    host.preempt(first)
    host.until_admitted()
    assert first.admitted_with == [0, 1, 2, 3]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_every_request_is_admitted(seed: int) -> None:
    random = Random(seed)
    host = Host(random.randint(1, 8), random.randint(0, 30), random)
    for _ in range(random.randint(1, 12)):
        begin = random.choice([0, 0, random.randint(0, 20)])
        host.request(range(begin, begin + random.randint(0, 20)))
        for _ in range(random.randint(0, 4)):
            host.step(random.randint(0, 2))
        admitted = [each for each in host.requests if each.admitted_with is not None]
        if admitted and not random.randint(0, 5):
            host.preempt(random.choice(admitted))
    host.until_admitted()
