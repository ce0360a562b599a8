"""Tasks that run beside a block end with it, whatever they do."""

import asyncio

import pytest

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
    async with beside(one.forever(), other.forever(), _fails()):
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


async def test_cancelled_waits_for_tasks_that_have_ended_already():
    ended = asyncio.create_task(_fails())
    await asyncio.wait([ended])
    await cancelled(ended)
