"""Tasks that run beside a block end with it, whatever they do."""

import asyncio

import pytest
import structlog

from tanghulu.runtime.tasks import beside, cancelled


class Work:
    def __init__(self):
        self.begun, self.over = asyncio.Event(), False

    async def forever(self):
        try:
            self.begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # an end that takes a turn of the loop is waited for
            self.over = True


async def _fails():
    raise RuntimeError("its own affair")


async def test_tasks_beside_a_block_have_ended_when_it_is_left():
    one, other = Work(), Work()
    async with beside(one.forever(), other.forever(), asyncio.sleep(0)):
        await one.begun.wait()
        await other.begun.wait()
        assert not one.over
    assert one.over
    assert other.over


async def test_an_error_in_the_block_ends_them_too():
    work = Work()

    async def block():
        async with beside(work.forever()):
            await work.begun.wait()
            raise ValueError("the block's")

    with pytest.raises(ValueError, match="the block's"):
        await block()
    assert work.over


async def test_one_that_fails_ends_the_block_and_the_others_and_is_in_the_log():
    work = Work()

    async def block():
        async with beside(work.forever(), _fails()):
            await asyncio.Event().wait()

    with structlog.testing.capture_logs() as logs, pytest.raises(RuntimeError, match="its own affair"):
        await block()
    assert work.over
    assert [line["task"] for line in logs if line["event"] == "task.failed"] == ["_fails"]
    assert asyncio.current_task().cancelling() == 0


async def test_a_block_that_is_cancelled_itself_stays_cancelled():
    work = Work()

    async def block():
        async with beside(work.forever()):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await work.begun.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert work.over


async def test_cancelled_waits_for_tasks_that_have_ended_already():
    ended = asyncio.create_task(_fails())
    await asyncio.wait([ended])
    await cancelled(ended)
