"""The conductor's own queue: order, priorities, ageing; and that the dispatcher keeps to it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.conductor.dispatch.queue import QueueOrder, WaitingQueue
from tanghulu.types import RequestId
from tests.conductor.cluster import running_cluster


def names(queue: WaitingQueue[str]) -> list[str]:
    return list(queue)


def test_first_come_first_served_within_a_priority():
    queue: WaitingQueue[str] = WaitingQueue()
    for now_s, (name, priority) in enumerate([("a", 0), ("b", 1), ("c", 0), ("d", 1), ("e", -1)]):
        queue.push(RequestId(name), name, now_s, priority, prefill_s=9.0 - now_s)
    assert names(queue) == ["b", "d", "a", "c", "e"]
    queue.discard(RequestId("d"))
    queue.discard(RequestId("d"))
    queue.push(RequestId("moved"), "moved", 0.5, front=True)
    queue.push(RequestId("moved too"), "moved too", 0.7, front=True)
    queue.push(RequestId("oldest, moved later"), "oldest, moved later", 0.1, front=True)
    queue.push(RequestId("moved, urgent"), "moved, urgent", 3, 1, front=True)
    assert names(queue) == ["moved, urgent", "oldest, moved later", "moved", "moved too", "b", "a", "c", "e"]
    queue.check()


def test_the_shortest_first_and_what_waits_is_overtaken_for_a_bounded_time():
    """The worked example of the module."""
    queue: WaitingQueue[str] = WaitingQueue(QueueOrder("sjf", 0.1))
    queue.push(RequestId("long"), "long", 0.0, prefill_s=3.0)
    queue.push(RequestId("in time"), "in time", 24.0, prefill_s=0.5)
    queue.push(RequestId("late"), "late", 26.0, prefill_s=0.5)
    assert names(queue) == ["in time", "long", "late"]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(-1, 1), st.floats(0, 5)), max_size=30))
def test_like_a_list_that_is_sorted_anew(steps):
    queue: WaitingQueue[str] = WaitingQueue(QueueOrder("sjf", 0.5))
    model: dict[str, tuple[int, float, int]] = {}
    for now, (which, leaves, priority, prefill_s) in enumerate(steps):
        name = str(which)
        if leaves or name in model:
            queue.discard(RequestId(name))
            model.pop(name, None)
        else:
            queue.push(RequestId(name), name, now, priority, prefill_s)
            model[name] = (-priority, prefill_s + 0.5 * now, now)
        queue.check()
        assert names(queue) == sorted(model, key=model.__getitem__)
        assert len(queue) == len(model)
        assert all((RequestId(n) in queue) == (n in model) for n in "012345")


@pytest.mark.parametrize(
    ("order", "expected"), [("fcfs", ["urgent", "x" * 90, "y" * 9]), ("sjf", ["urgent", "y" * 9, "x" * 90])]
)
async def test_who_waits_is_sent_in_that_order(tmp_path, order, expected):
    async with running_cluster(tmp_path, max_in_flight=1, queue_order=order) as cluster:
        worker = await cluster.add()
        worker.hold()

        async def ask(prompt: str, **more: object) -> None:
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1, **more}
            answer = await cluster.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

        tasks = [asyncio.create_task(ask("first"))]
        await cluster.until(lambda: worker.submits)
        for number, (prompt, priority) in enumerate([("x" * 90, 0), ("y" * 9, 0), ("urgent", 5)], 1):
            tasks.append(asyncio.create_task(ask(prompt, priority=priority)))
            await cluster.until(lambda n=number: len(cluster.dispatcher._queue) == n)
        cluster.dispatcher.check()
        worker.release()
        await asyncio.gather(*tasks)
        lengths = [submit.num_prompt_tokens for submit in worker.submits[1:]]
        model = next(iter(cluster.registry.models.values()))
        assert lengths == [len(await model.encode(prompt, True)) for prompt in expected]
