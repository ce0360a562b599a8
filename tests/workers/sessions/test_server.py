"""Who is told what of a step: outputs at once, the rest to everybody in few messages and in order."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from tanghulu.errors import InvalidRequest
from tanghulu.rpc.fast_server import AnswerStream, Later, Peer
from tanghulu.rpc.frames import Frame
from tanghulu.session.load import PeerRead, WorkerLoad
from tanghulu.session.messages import Abort, FromWorker, SessionHello, Submit, ToWorker
from tanghulu.session.outputs import Output
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import BlockHash, InstanceId, RequestId
from tanghulu.workers.engine.block_pool import KvEvent, KvEventKind
from tanghulu.workers.engine.step import StepResult
from tanghulu.workers.engine.thread import EngineLoad, StepReport
from tanghulu.workers.sessions import outbox, server, wire
from tanghulu.workers.sessions.server import SessionHub, TakesSnapshot


def _submit(request_id: str) -> ToWorker:
    return ToWorker(Submit(RequestId(request_id), bytes(4), 1, Sampling(), StopRule(9)))


class _Engine:
    """Does at once what it is told; the cache holds what was told."""

    def __init__(self) -> None:
        self.cached: list[BlockHash] = []
        self._num_added = 0

    def submit(self, request: object, added, refused) -> None:
        self._num_added += 1
        added(self._num_added)

    def abort(self, request_id: RequestId) -> None:
        pass

    def snapshot(self, take) -> None:
        take(list(self.cached), EngineLoad(), [])


class _Wire:
    """A connection's writing side; the conductor takes what was sent when it reads, and nothing more until it does."""

    def __init__(self) -> None:
        self.sent: list[FromWorker] = []
        self.takes = True
        self.closed = False

    def answer(self, frame: Frame, message: FromWorker) -> None:
        if not self.closed:
            self.sent.append(message)
            self.takes = False

    def hang_up(self) -> None:
        self.closed = True


class _Conductor:
    """One conductor's stream, read by hand."""

    def __init__(self, hub: SessionHub, name: str) -> None:
        self._hub = hub
        self._peer = Peer(None, False, name)
        self._wire = _Wire()
        self.stream = self.say(ToWorker(SessionHello(name, 1)))
        assert isinstance(self.stream, AnswerStream)
        self.stream.begin(self._wire, Frame(54, 1, b""))  # type: ignore[arg-type]

    def say(self, message: ToWorker) -> AnswerStream | Later:
        return self._hub.receive(self._peer, message, memoryview(b""))

    async def read(self) -> FromWorker:
        """The next message. Raises EOFError when there is none because the session has ended."""
        async with asyncio.timeout(30):
            while not self._wire.sent:
                if self._wire.closed:
                    raise EOFError
                await asyncio.sleep(0)
        message = self._wire.sent.pop(0)
        if not self._wire.sent and not self._wire.takes:
            self._wire.takes = True
            assert isinstance(self.stream, AnswerStream)
            self.stream.on_room()
        return message

    def close(self) -> None:
        for callback in self._peer.on_close:
            callback()


class _Scene:
    def __init__(self) -> None:
        self.engine = _Engine()
        #: What requests wait for, by their ids.
        self.compiling: dict[str, Future[None]] = {}
        factory = SimpleNamespace(
            request=lambda submit: submit, compiling=lambda submit: self.compiling.get(submit.request_id)
        )
        self.hub = SessionHub(InstanceId("w"), 1, factory, self.engine, lambda report: {}, lambda export: None)
        self.num_steps = 0

    def step(self, *request_ids: str, reads: tuple[PeerRead, ...] = (), num_added: int = 0) -> None:
        """A step with an output for each of ``request_ids`` and a new block in the cache."""
        self.num_steps += 1
        block = BlockHash(self.num_steps.to_bytes(16, "big"))
        self.engine.cached.append(block)
        outputs = tuple(Output(RequestId(r), [1]) for r in request_ids)
        result = StepResult(outputs, num_sequences=1, kv_events=(KvEvent(KvEventKind.STORED, block),))
        load = EngineLoad(WorkerLoad(num_running=self.num_steps, reads=reads), num_added=num_added)
        self.hub.on_reports([StepReport(result, load)])


@pytest.fixture
async def scene():
    scene = _Scene()
    conductors = [_Conductor(scene.hub, name) for name in ("busy", "idle")]
    for conductor in conductors:
        assert (await conductor.read()).message.event_sequence == 0
    busy, idle = conductors
    busy.say(_submit("r1"))
    yield scene, busy, idle
    for conductor in conductors:
        conductor.close()


async def test_who_has_no_output_in_a_step_is_told_of_many_at_once(scene, monkeypatch):
    here, busy, idle = scene
    monkeypatch.setattr(outbox, "SPREAD_S", 0.2)
    for _ in range(10):
        here.step("r1")
    told = (await busy.read()).message
    assert (told.event_sequence, len(told.kv_events), len(told.outputs[0].tokens)) == (0, 10, 10)
    heard, num_messages = [], 0
    while len(heard) < 10:
        step = (await idle.read()).message
        num_messages += 1
        assert step.event_sequence == len(heard), "nothing is missing in front of it"
        heard += [stored for event in step.kv_events for stored in event.stored]
    assert heard == here.engine.cached
    assert step.load.num_running == 10, "the latest"
    assert num_messages < 10


async def test_steps_that_come_while_one_is_written_are_one_message(scene):
    """Three steps of r1, the last two of r2, too, before the conductor reads again."""
    here, busy, _ = scene
    busy.say(_submit("r2"))
    here.step("r1")
    here.step("r1", "r2")
    here.step("r1", "r2")
    step = (await busy.read()).message
    assert {o.request_id: len(o.tokens) for o in step.outputs} == {"r1": 3, "r2": 2}
    assert (step.event_sequence, len(step.kv_events), step.load.num_running) == (0, 3, 3)


async def test_a_conductor_that_does_not_read_loses_its_session(scene, monkeypatch):
    here, busy, _ = scene
    monkeypatch.setattr(server, "MAX_UNREAD_STEPS", 4)
    for _ in range(5):
        here.step("r1")
    assert len((await busy.read()).message.outputs[0].tokens) == 5
    with pytest.raises(EOFError):
        await busy.read()


async def test_the_last_outputs_leave_before_the_session_ends(scene):
    here, busy, _ = scene
    here.step("r1")
    here.hub.close()
    assert [o.request_id for o in (await busy.read()).message.outputs] == ["r1"]
    with pytest.raises(EOFError):
        await busy.read()


async def test_an_output_takes_along_what_waited(scene, monkeypatch):
    here, busy, _ = scene
    monkeypatch.setattr(outbox, "SPREAD_S", 3600.0)
    here.step()
    assert len((await busy.read()).message.kv_events) == 1, "the first in a while goes out at once"
    here.step()
    here.step("r1")
    step = (await busy.read()).message
    assert (step.event_sequence, len(step.kv_events), len(step.outputs)) == (1, 2, 1)


async def test_a_snapshot_holds_what_waited_and_measured_reads_do_not_wait(scene, monkeypatch):
    here, _, idle = scene
    monkeypatch.setattr(outbox, "SPREAD_S", 3600.0)
    here.step()
    assert (await idle.read()).message.event_sequence == 0
    here.step()
    idle.say(ToWorker(SessionHello("idle", 1)))
    welcome = (await idle.read()).message
    assert (len(welcome.cached_blocks), welcome.event_sequence) == (2, 2)
    here.step(reads=(PeerRead("h:1", 10, 0.5),))
    step = (await idle.read()).message
    assert (step.event_sequence, len(step.kv_events), len(step.load.reads)) == (2, 1, 1)


async def test_events_that_wait_are_bounded(scene, monkeypatch):
    here, _, idle = scene
    monkeypatch.setattr(outbox, "SPREAD_S", 3600.0)
    monkeypatch.setattr(outbox, "MAX_PENDING_EVENTS", 4)
    here.step()
    assert len((await idle.read()).message.kv_events) == 1
    for _ in range(5):
        here.step()
    assert len((await idle.read()).message.kv_events) == 5


async def test_a_load_says_how_many_of_the_sessions_submissions_it_holds(scene):
    """Of three submissions of two conductors the engine had taken one, then two, when its load was measured."""
    here, busy, idle = scene
    idle.say(_submit("other"))
    busy.say(_submit("r2"))
    told = []
    for num_added in range(4):
        here.step("r1", "other", num_added=num_added)
        told.append(((await busy.read()).message.submits_taken, (await idle.read()).message.submits_taken))
    assert told == [(0, 0), (1, 0), (1, 1), (2, 1)]


async def test_a_session_begins_with_a_hello(scene):
    here, _, _ = scene
    with pytest.raises(InvalidRequest, match="SessionHello"):
        here.hub.receive(Peer(None, False, "x"), _submit("r9"), memoryview(b""))
    assert here.hub.num_requests == 1


async def test_requests_end_with_their_session(scene):
    here, busy, _ = scene
    busy.say(_submit("r2"))
    assert here.hub.num_requests == 2
    here.hub.close()
    assert here.hub.num_requests == 0
    assert here.hub.idle.is_set()


async def test_nothing_is_written_to_who_does_not_take_it(scene):
    """The step behind the first waits until the conductor has read that, though the loop turns meanwhile."""
    here, busy, _ = scene
    for _ in range(3):
        here.step("r1")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert [len((await busy.read()).message.outputs[0].tokens) for _ in range(2)] == [1, 2]


async def test_a_message_that_no_frame_holds_ends_the_session(scene, monkeypatch):
    here, busy, _ = scene

    def too_large(frame, message):
        raise InvalidRequest("a frame of so many bytes")

    monkeypatch.setattr(busy._wire, "answer", too_large)
    here.step("r1")
    with pytest.raises(EOFError):
        await busy.read()
    assert here.hub.num_requests == 0


def test_a_snapshot_fits_a_frame(monkeypatch):
    monkeypatch.setattr(wire, "MAX_WELCOME_BYTES", 100)
    hashes = [BlockHash(number.to_bytes(16, "big")) for number in range(9)]
    welcome = wire.welcome_message(InstanceId("w"), 1, hashes, 0, WorkerLoad())
    assert list(welcome.cached_blocks) == hashes[:5]


async def test_a_conductor_that_leaves_before_its_snapshot_is_sent_nothing(scene):
    here, _, idle = scene
    takes: list[TakesSnapshot] = []
    here.engine.snapshot = takes.append
    gone = _Conductor(here.hub, "gone")
    gone.close()
    takes[0]([], EngineLoad(), [KvEvent(KvEventKind.STORED, BlockHash(bytes(16)))])
    assert (await idle.read()).message.kv_events, "the events before the snapshot are everybody's"
    here.step()
    await idle.read()
    assert gone._wire.sent == []


async def test_a_request_waits_for_its_grammar_and_the_loop_does_not(scene):
    here, busy, _ = scene
    begun: list[str] = []
    here.engine.submit = lambda request, added, refused: begun.append(request.request_id)
    for name in ("good", "bad", "aborted"):
        here.compiling[name] = Future()
        busy.say(_submit(name))
    busy.say(_submit("plain"))
    assert begun == ["plain"]
    busy.say(ToWorker(Abort(RequestId("aborted"))))
    here.compiling["bad"].set_exception(InvalidRequest("no such grammar"))
    for name in ("good", "aborted"):
        here.compiling[name].set_result(None)
    (refused,) = (await busy.read()).message.outputs
    assert (refused.request_id, refused.failure.message) == ("bad", "no such grammar")
    assert begun == ["plain", "good"]
