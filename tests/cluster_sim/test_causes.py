"""Explanations beside the truth, over seeds: 99 of 100 computed blocks at least are right, and none certainly wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cluster_sim.causes import Injections

_FEW, _MANY = range(2), range(100, 300)


def _run(seeds: range) -> tuple[Counter[tuple[str, str]], list[str]]:
    blocks, errors = Counter[tuple[str, str]](), list[str]()
    for seed in seeds:
        world = Injections(seed)
        world.run()
        blocks += world.blocks
        errors += world.errors
    return blocks, errors


def _check(seeds: range) -> None:
    blocks, errors = _run(seeds)
    scenarios = {scenario.__name__ for seed in _FEW for scenario in Injections(seed).scenarios()} | {"tail"}
    totals = Counter[str]()
    for (_, verdict), number in blocks.items():
        totals[verdict] += number
    for name in sorted(scenarios):
        print(name, {verdict: blocks[name, verdict] for verdict in ("right", "uncertain", "wrong", "certain")})
    assert not totals["wrong"], "\n".join(errors[:10])
    assert totals["right"] >= 0.99 * (totals["right"] + totals["uncertain"]), "\n".join(errors[:10])
    assert {name for name, verdict in blocks if verdict == "right"} == scenarios, "each cause was injected"


def test_every_cause() -> None:
    _check(_FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_cause_with_many_seeds() -> None:
    _check(_MANY)
