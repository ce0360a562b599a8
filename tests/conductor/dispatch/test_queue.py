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
    queue.push(RequestId("moved"), "moved", 0.5, client=None)
    queue.push(RequestId("moved too"), "moved too", 0.7, client=None)
    queue.push(RequestId("oldest, moved later"), "oldest, moved later", 0.1, client=None)
    queue.push(RequestId("moved, urgent"), "moved, urgent", 3, 1, client=None)
    assert names(queue) == ["moved, urgent", "oldest, moved later", "moved", "moved too", "b", "a", "c", "e"]
    queue.check()


def test_the_shortest_first_and_what_waits_is_overtaken_for_a_bounded_time():
    """The worked example of the module."""
    queue: WaitingQueue[str] = WaitingQueue(QueueOrder("sjf", 0.1))
    queue.push(RequestId("long"), "long", 0.0, prefill_s=3.0)
    queue.push(RequestId("in time"), "in time", 24.0, prefill_s=0.5)
    queue.push(RequestId("late"), "late", 26.0, prefill_s=0.5)
    assert names(queue) == ["in time", "long", "late"]


def test_clients_take_turns():
    """The worked example of the module, and 600 beside one."""
    queue: WaitingQueue[str] = WaitingQueue()
    queue.push(RequestId("a1"), "a1", 0.0, client="a")
    queue.push(RequestId("a2"), "a2", 1.0, client="a")
    queue.push(RequestId("b"), "b", 2.0, client="b")
    queue.push(RequestId("urgent"), "urgent", 3.0, 5, client="a")
    assert names(queue) == ["urgent", "b", "a1", "a2"]
    for name in names(queue):
        queue.take(RequestId(name))
    for number in range(600):
        queue.push(RequestId(f"many{number}"), f"many{number}", 4.0, priority=9, client="a")
    for number in range(20):
        queue.take(RequestId(f"many{number}"))
    queue.push(RequestId("one"), "one", 5.0, client="b")
    assert names(queue)[:2] == ["one", "many20"]
    queue.check()


def test_a_request_that_gives_up_costs_its_client_no_turn():
    queue: WaitingQueue[str] = WaitingQueue()
    for name in ("a1", "a2", "a3"):
        queue.push(RequestId(name), name, 0.0, client="a")
    queue.push(RequestId("b1"), "b1", 0.0, client="b")
    queue.discard(RequestId("a1"))
    queue.check()
    assert names(queue) == ["a2", "b1", "a3"]


def test_it_may_change_while_it_is_walked():
    queue: WaitingQueue[str] = WaitingQueue()
    for number in range(6):
        queue.push(RequestId(str(number)), str(number), 0.0, client="ab"[number % 2])
    walked = []
    for name in queue:
        walked.append(name)
        queue.take(RequestId(name))
        queue.discard(RequestId("3"))
        queue.check()
    assert walked == ["0", "1", "2", "4", "5"]


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


async def test_six_hundred_of_one_client_do_not_keep_another_waiting(tmp_path):
    """At the conductor: of those that wait the other client's single one is sent next; its ``user`` says who it is."""
    async with running_cluster(tmp_path, max_in_flight=4) as cluster:
        worker = await cluster.add()
        worker.hold()

        async def ask(user: str) -> int:
            body = {"model": "tiny", "prompt": user, "max_tokens": 1, "user": user, "stream": True}
            return (await cluster.http.post("/v1/completions", json=body)).status_code

        many = [asyncio.create_task(ask("many")) for _ in range(60)]
        await cluster.until(lambda: len(cluster.dispatcher._queue) == 56)
        one = asyncio.create_task(ask("one"))
        await cluster.until(lambda: len(cluster.dispatcher._queue) == 57)
        worker.release()
        assert set(await asyncio.gather(one, *many)) == {200}
        clients = [submit.client for submit in worker.submits]
        assert clients.index("user one") <= 5
        assert clients.count("user many") == 60


def test_a_client_of_weight_two_has_two_turns_for_each_of_anothers():
    queue: WaitingQueue[str] = WaitingQueue()
    for number in range(4):
        queue.push(RequestId(f"heavy {number}"), f"heavy {number}", 0.0, client="heavy", weight=2.0)
    for number in range(2):
        queue.push(RequestId(f"light {number}"), f"light {number}", 0.0, client="light")
    assert [name.split()[0] for name in names(queue)] == ["heavy", "light", "heavy", "heavy", "light", "heavy"]
    queue.check()
