"""Many hand-overs at once in virtual time, some of them aborted: all end, and no worker holds anything of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tanghulu.types import RequestId, Role
from tests.conductor.virtual_workers import WIRE_S, VirtualCluster


@pytest.mark.parametrize(("seed", "num_blocks"), [(1, 400), (2, 400), (3, 90)])
async def test_what_is_pulled_is_used_or_given_back(seed: int, num_blocks: int) -> None:
    draw = random.Random(seed)
    cluster = VirtualCluster("ttft-min", 4, num_blocks, (Role.PREFILL, Role.DECODE), step_tokens=256)
    ended: list[int] = []
    num_aborted = 0
    for number in range(60):
        prompt = np.array(draw.choices(range(200), k=draw.randint(100, 2000)), dtype=np.uint32)
        at_s = draw.random() * 3

        def ask(number: int = number, prompt: np.ndarray = prompt) -> None:
            cluster.ask(number, prompt, draw.randint(2, 30), ended.append)

        cluster.time.after(at_s, ask)
        if draw.random() < 0.3:

            def abort(number: int = number) -> None:
                nonlocal num_aborted
                num_aborted += cluster.dispatcher.abort(RequestId(f"r{number}"))

            cluster.time.after(at_s + draw.random() * 0.3 + WIRE_S, abort)
    cluster.time.run()
    cluster.check()
    assert len(ended) == 60
    assert num_aborted > 3
    assert sum(worker.num_pulled for worker in cluster.workers) > 100
    for worker in cluster.workers:
        assert worker.scheduler.pulls.check() is None
        assert len(worker.scheduler.pulls) == 0
        assert worker.pool.num_in_use == 0, worker.scheduler
