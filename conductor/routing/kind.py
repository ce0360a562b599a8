"""Measurements of workers of one kind (a model and a role), used for a worker without its own.

Pure. A worker measures its speed by working, and gets no work while it looks slow; a new one among fast ones would stay
idle. So the median of the others is assumed until it reports its own. Example: four workers prefill 20,000 tokens a
second each. A fifth arrives and is assumed to do 20,000 too, not the default of 2,000 used without any measurement.

A median that moves by less than ``TOLERANCE`` is not reported: views of the unmeasured would be rebuilt all the time.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from tanghulu.session.load import DecodeProfile, PrefillProfile, WorkerLoad

TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Typical:
    """Speeds and profiles of the median worker; 0 and None until measured."""

    prefill_tokens_per_s: float = 0.0
    prefill: PrefillProfile | None = None
    decode_step_s: float = 0.0
    decode: DecodeProfile | None = None


class KindOfWorkers:
    """The latest measurements of workers, identified by numbers; ``typical`` is their median."""

    def __init__(self) -> None:
        self.typical = Typical()
        self.unmeasured: set[int] = set()
        self._loads: dict[int, WorkerLoad] = {}
        self._prefills: list[tuple[float, int]] = []
        self._decodes: list[tuple[float, int]] = []

    def report(self, number: int, load: WorkerLoad) -> bool:
        """Record a worker's report; return whether the median has changed."""
        before = self._loads.get(number)
        if before is load:
            return False
        self._loads[number] = load
        _replace(self._prefills, number, _prefill_speed(before) if before else 0.0, _prefill_speed(load))
        _replace(self._decodes, number, before.decode_step_s if before else 0.0, load.decode_step_s)
        if _prefill_speed(load) and load.decode_step_s:
            self.unmeasured.discard(number)
        else:
            self.unmeasured.add(number)
        return self._renew()

    def check(self) -> None:
        speeds = [(_prefill_speed(load), number) for number, load in self._loads.items()]
        assert self._prefills == sorted(each for each in speeds if each[0])
        assert self._decodes == sorted((load.decode_step_s, n) for n, load in self._loads.items() if load.decode_step_s)
        assert self.unmeasured <= self._loads.keys()

    def _renew(self) -> bool:
        prefill, decode = _median(self._prefills), _median(self._decodes)
        known = self.typical
        if _near(known.prefill_tokens_per_s, prefill[0]) and _near(known.decode_step_s, decode[0]):
            return False
        self.typical = Typical(
            prefill[0],
            self._loads[prefill[1]].prefill if prefill[0] else None,
            decode[0],
            self._loads[decode[1]].decode if decode[0] else None,
        )
        return True


def _prefill_speed(load: WorkerLoad) -> float:
    if load.prefill_tokens_per_s or load.prefill is None or not load.prefill.token_s:
        return load.prefill_tokens_per_s
    return 1 / load.prefill.token_s


def _replace(ordered: list[tuple[float, int]], number: int, before: float, now: float) -> None:
    if before:
        del ordered[bisect.bisect_left(ordered, (before, number))]
    if now:
        bisect.insort(ordered, (now, number))


def _median(ordered: list[tuple[float, int]]) -> tuple[float, int]:
    return ordered[len(ordered) // 2] if ordered else (0.0, 0)


def _near(known: float, now: float) -> bool:
    return abs(now - known) <= TOLERANCE * known
