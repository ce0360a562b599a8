"""Who is told what of a step: outputs at once, the rest to everybody in few messages and in order."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tanghulu.protos import session_pb2 as pb
from tanghulu.types import BlockHash, InstanceId, RequestId
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind
from tanghulu.workers.engine.speed import PeerReadTotal
from tanghulu.workers.engine.step_result import RequestOutput, StepResult
from tanghulu.workers.engine.thread import EngineLoad, StepReport
from tanghulu.workers.sessions import server
from tanghulu.workers.sessions.server import SessionHub


class _Engine:
    """Commands run at once; the cache holds what was told."""

    def __init__(self) -> None:
        self.cached: list[BlockHash] = []
        pool = SimpleNamespace(matchable_hashes=lambda: list(self.cached), take_events=list)
        self.scheduler = SimpleNamespace(pool=pool, num_added=0)
        self.core = SimpleNamespace(add=self._add, abort=lambda request_id: True, scheduler=self.scheduler)

    def _add(self, request: object) -> None:
        self.scheduler.num_added += 1

    def post(self, command) -> None:
        command(self.core)

    def load(self) -> EngineLoad:
        return EngineLoad()


class _Conductor:
    """One conductor's stream, read by hand."""

    def __init__(self, hub: SessionHub, name: str) -> None:
        self._said: asyncio.Queue[pb.ToWorker] = asyncio.Queue()
        self._stream = hub.serve(self._requests())
        self.say(pb.ToWorker(hello=pb.SessionHello(conductor_id=name, protocol_version=1)))

    async def _requests(self):
        while True:
            yield await self._said.get()

    def say(self, message: pb.ToWorker) -> None:
        self._said.put_nowait(message)

    async def read(self) -> pb.FromWorker:
        async with asyncio.timeout(30):
            return await anext(self._stream)

    async def close(self) -> None:
        await self._stream.aclose()


class _Scene:
    def __init__(self) -> None:
        self.engine = _Engine()
        factory = SimpleNamespace(request=lambda submit: submit)
        self.hub = SessionHub(InstanceId("w"), 1, factory, self.engine, lambda report: {}, lambda export: None)
        self.num_steps = 0

    async def owns(self, num_requests: int) -> None:
        """Wait until so many submissions have arrived."""
        async with asyncio.timeout(30):
            while len(self.hub._owners) < num_requests:  # noqa: ASYNC110 - it has no hook for tests
                await asyncio.sleep(0)

    def step(self, *request_ids: str, reads: tuple[PeerReadTotal, ...] = (), num_added: int = 0) -> None:
        """A step with an output for each of ``request_ids`` and a new block in the cache."""
        self.num_steps += 1
        block = BlockHash(self.num_steps.to_bytes(16, "big"))
        self.engine.cached.append(block)
        outputs = tuple(RequestOutput(RequestId(r), (1,), None, None, 1, 1, 0) for r in request_ids)
        result = StepResult(outputs, num_sequences=1, kv_events=(KvEvent(KvEventKind.STORED, block),))
        load = EngineLoad(num_running=self.num_steps, reads=reads, num_added=num_added)
        self.hub.on_report(StepReport(result, {}, load))


@pytest.fixture
async def scene():
    scene = _Scene()
    conductors = [_Conductor(scene.hub, name) for name in ("busy", "idle")]
    for conductor in conductors:
        assert (await conductor.read()).welcome.event_sequence == 0
    busy, idle = conductors
    busy.say(pb.ToWorker(submit=pb.Submit(request_id="r1")))
    await scene.owns(1)
    yield scene, busy, idle
    for conductor in conductors:
        await conductor.close()


async def test_who_has_no_output_in_a_step_is_told_of_many_at_once(scene, monkeypatch):
    here, busy, idle = scene
    monkeypatch.setattr(server, "SPREAD_S", 0.2)
    for _ in range(10):
        here.step("r1")
    told = [(await busy.read()).step for _ in range(10)]
    assert [step.event_sequence for step in told] == list(range(10))
    assert all(len(step.outputs) == 1 for step in told)
    heard, num_messages = [], 0
    while len(heard) < 10:
        step = (await idle.read()).step
        num_messages += 1
        assert step.event_sequence == len(heard), "nothing is missing in front of it"
        heard += [stored for event in step.kv_events for stored in event.stored]
    assert heard == here.engine.cached
    assert step.load.num_running == 10, "the latest"
    assert num_messages < 10


async def test_an_output_takes_along_what_waited(scene, monkeypatch):
    here, busy, _ = scene
    monkeypatch.setattr(server, "SPREAD_S", 3600.0)
    here.step()
    here.step()
    here.step("r1")
    assert len((await busy.read()).step.kv_events) == 1, "the first in a while goes out at once"
    step = (await busy.read()).step
    assert (step.event_sequence, len(step.kv_events), len(step.outputs)) == (1, 2, 1)


async def test_a_snapshot_holds_what_waited_and_measured_reads_do_not_wait(scene, monkeypatch):
    here, _, idle = scene
    monkeypatch.setattr(server, "SPREAD_S", 3600.0)
    here.step()
    here.step()
    assert (await idle.read()).step.event_sequence == 0
    idle.say(pb.ToWorker(hello=pb.SessionHello(conductor_id="idle", protocol_version=1)))
    welcome = (await idle.read()).welcome
    assert (len(welcome.cached_blocks), welcome.event_sequence) == (2, 2)
    here.step(reads=(PeerReadTotal("h:1", 10, 0.5),))
    step = (await idle.read()).step
    assert (step.event_sequence, len(step.kv_events), len(step.load.reads)) == (2, 1, 1)


async def test_events_that_wait_are_bounded(scene, monkeypatch):
    here, _, idle = scene
    monkeypatch.setattr(server, "SPREAD_S", 3600.0)
    monkeypatch.setattr(server, "MAX_UNTOLD_EVENTS", 4)
    for _ in range(6):
        here.step()
    assert len((await idle.read()).step.kv_events) == 1
    assert len((await idle.read()).step.kv_events) == 5


async def test_a_load_says_how_many_of_the_sessions_submissions_it_holds(scene):
    """Of three submissions of two conductors the engine had taken one, then two, when its load was measured."""
    here, busy, idle = scene
    idle.say(pb.ToWorker(submit=pb.Submit(request_id="other")))
    await here.owns(2)
    busy.say(pb.ToWorker(submit=pb.Submit(request_id="r2")))
    await here.owns(3)
    told = []
    for num_added in range(4):
        here.step("r1", "other", num_added=num_added)
        told.append(((await busy.read()).step.submits_taken, (await idle.read()).step.submits_taken))
    assert told == [(0, 0), (1, 0), (1, 1), (2, 1)]
