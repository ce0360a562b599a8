"""``VllmEngine`` over a fake ``AsyncLLM``: outputs, aborts, refusals, beats, deaths, and what reports say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.vllm_worker import engine as module
from tanghulu.engines.vllm_worker.engine import LoadBook, VllmEngine, VllmSurface
from tanghulu.engines.vllm_worker.requests import VllmRequest
from tanghulu.errors import Conflict, DeadlineExceeded, InvalidRequest, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.session.outputs import FinishReason, KvChange
from tanghulu.types import BlockHash, RequestId
from tanghulu.workers.engine.exports import KvExport
from tanghulu.workers.engine.thread import StepReport

NAMES = [BlockHash(bytes([i]) * 32) for i in range(4)]


class _DeadError(Exception):
    """As ``EngineDeadError``."""


class _RefusedError(ValueError):
    """As ``VLLMValidationError``."""


class _Llm:
    """``AsyncLLM``: a request's outputs are put into its queue by hand; an exception is raised, None hangs up."""

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.aborted: list[str] = []
        self.dead = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.resets = [True]

    async def generate(self, prompt: Any, sampling_params: Any, request_id: str, *, priority: int = 0):
        queue = self.queues[request_id] = asyncio.Queue()
        try:
            while (output := await queue.get()) is not None:
                if isinstance(output, Exception):
                    raise output
                yield output
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request_id)
            raise

    async def check_health(self) -> None:
        if self.dead:
            raise _DeadError

    async def is_sleeping(self) -> bool:
        await self.answers.wait()
        return False

    async def reset_prefix_cache(self) -> bool:
        return self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]


class _Scene:
    def __init__(self, max_requests: int = 4) -> None:
        self.llm = _Llm()
        self.waited: list[Sequence[BlockHash]] = []
        self.stored = asyncio.Event()
        self.reports: list[StepReport] = []
        self.failures: list[BaseException] = []
        self.refusals: list[TanghuluError] = []
        self.added: list[int] = []
        surface = VllmSurface(self.llm, lambda request: request.sampling, _DeadError, (_RefusedError,))
        reports = self.reports.append, self.failures.append
        self.engine = VllmEngine(surface, LoadBook(10, 2), 4, *reports, max_requests, self._store)

    async def _store(self, hashes: Sequence[BlockHash]) -> bool:
        self.waited.append(hashes)
        return await self.stored.wait()

    def submit(self, name: str, num_tokens: int = 6, **more: Any) -> None:
        request = VllmRequest(RequestId(name), [1] * num_tokens, num_tokens, NAMES[: num_tokens // 4], {}, **more)
        self.engine.submit(request, self.added.append, self.refusals.append)

    async def put(self, name: str, output: Any) -> None:
        await self.until(lambda: name in self.llm.queues)
        self.llm.queues[name].put_nowait(output)

    async def until(self, condition) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 - it has no hook for tests
                await asyncio.sleep(0)
        self.engine.check()

    def tokens(self) -> dict[str, list[int]]:
        told: dict[str, list[int]] = {}
        for report in self.reports:
            for output in report.result.outputs:
                told.setdefault(output.request_id, []).extend(output.tokens)
        return told


def output(*tokens: int, finish: str | None = None) -> Any:
    one = SimpleNamespace(token_ids=list(tokens), finish_reason=finish, logprobs=None)
    return SimpleNamespace(outputs=[one], num_cached_tokens=0, kv_transfer_params=None)


@pytest.fixture
async def scene():
    scene = _Scene()
    yield scene
    await scene.engine.close()
    scene.engine.check()


async def test_requests_side_by_side_are_told_and_forgotten(scene):
    scene.submit("a")
    scene.submit("b")
    assert scene.added == [1, 2]
    assert (scene.engine.load().shared.num_waiting, scene.engine.load().shared.prefill_tokens_waiting) == (2, 12)
    await scene.put("a", output(7))
    await scene.put("b", output(8))
    await scene.until(lambda: scene.tokens() == {"a": [7], "b": [8]})
    assert scene.engine.load().shared.prefill_tokens_waiting == 0
    await scene.put("a", output(9, finish="stop"))
    await scene.put("a", None)
    await scene.until(lambda: scene.engine.load().shared.num_waiting == 1)
    assert scene.tokens()["a"] == [7, 9]
    assert scene.reports[-1].load.num_added == 2


async def test_tokens_that_are_cached_do_not_wait_to_be_computed(scene):
    scene.engine.on_change(KvChange(stored=tuple(NAMES[:1])))
    scene.submit("a", 10)
    assert scene.engine.load().shared.prefill_tokens_waiting == 6
    scene.engine.on_change(KvChange(stored=tuple(NAMES[1:])))
    scene.submit("b", 8)
    assert scene.engine.load().shared.prefill_tokens_waiting == 7, "the last token is computed always"


async def test_an_abort_reaches_vllm(scene):
    scene.submit("a")
    await scene.until(lambda: "a" in scene.llm.queues)
    scene.engine.abort(RequestId("a"))
    await scene.until(lambda: scene.llm.aborted == ["a"])
    await scene.until(lambda: scene.reports and scene.reports[-1].load.shared.num_waiting == 0)
    scene.submit("b")
    scene.engine.abort(RequestId("b"))  # before vLLM has heard of it
    await scene.until(lambda: scene.engine.load().shared.num_waiting == 0)
    assert scene.refusals == []


async def test_what_vllm_refuses_and_where_it_fails(scene):
    for name, error in (("a", _RefusedError("no")), ("b", RuntimeError("oh"))):
        scene.submit(name)
        await scene.put(name, error)
        await scene.until(lambda: scene.engine.load().shared.num_waiting == 0)
    scene.submit("c")
    await scene.put("c", output(finish="error"))
    await scene.until(lambda: len(scene.refusals) == 3)
    assert [type(error) for error in scene.refusals] == [InvalidRequest, NodeUnavailable, NodeUnavailable]
    assert scene.failures == []


async def test_no_more_than_may_be_here_and_each_once(scene):
    for name in "abcd":
        scene.submit(name)
    scene.submit("e")
    scene.submit("a")
    assert [type(error) for error in scene.refusals] == [Overloaded, Conflict]
    assert scene.added == [1, 2, 3, 4]


async def test_a_snapshot_stands_between_reports(scene):
    scene.engine.on_change(KvChange(stored=(NAMES[0],)))
    seen: list[Any] = []
    scene.engine.snapshot(lambda names, load, events: seen.append((names, [each.block_hash for each in events])))
    scene.engine.on_change(KvChange(stored=(NAMES[1],)))
    await scene.until(lambda: scene.reports)
    assert seen == [([NAMES[0]], [NAMES[0]])], "what no report has told yet goes along"
    told = [event.block_hash for report in scene.reports for event in report.result.kv_events]
    assert told == [NAMES[1]]


async def test_a_beat_is_told_only_when_vllm_answers(scene):
    scene.llm.answers.clear()
    scene.engine.beat()
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.reports == []
    scene.llm.answers.set()
    await scene.until(lambda: scene.reports)


async def test_the_death_of_vllm_is_told_once(scene, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    watching = asyncio.create_task(scene.engine.watch())
    scene.submit("a")
    scene.llm.dead = True
    await scene.until(lambda: scene.failures)
    await scene.put("a", _DeadError())
    await scene.until(lambda: scene.engine.load().shared.num_waiting == 0)
    assert len(scene.failures) == 1
    assert scene.refusals == [], "its session ends, and the conductor looks for another worker"
    with contextlib.suppress(asyncio.CancelledError):
        await watching


async def test_probes(scene):
    request = VllmRequest(RequestId("probe"), [0], 1, [], {})
    probing = asyncio.create_task(scene.engine.probe(request, 30.0))
    await scene.put("probe-1", output(1))
    assert await probing >= 0
    with pytest.raises(DeadlineExceeded):
        await scene.engine.probe(request, 0.001)
    await scene.until(lambda: "probe-2" in scene.llm.aborted)


async def test_forgetting_the_cache_waits_for_saves_and_not_for_requests(scene, monkeypatch):
    monkeypatch.setattr(module, "DROP_AGAIN_S", 0.001)
    scene.engine.on_change(KvChange(stored=tuple(NAMES)))
    scene.llm.resets = [False, False, True]
    assert await scene.engine.drop_cached() == 4
    scene.llm.resets = [False]
    scene.submit("a")
    with pytest.raises(Conflict):
        await scene.engine.drop_cached()


async def test_figures_of_a_step(scene):
    scene.submit("a")
    scene.submit("b")
    details = SimpleNamespace(
        is_dummy=False,
        elapsed_ms=500.0,
        num_ctx_tokens=500,
        num_generation_tokens=0,
        num_ctx_requests=1,
        num_generation_requests=0,
    )
    scene.engine.on_stats(SimpleNamespace(num_running_reqs=1, kv_cache_usage=0.3, iteration_details=details))
    scene.engine.on_stats(None)
    load = scene.engine.load()
    assert (load.shared.num_running, load.shared.num_waiting) == (1, 1)
    assert (load.shared.blocks_total, load.shared.blocks_free, load.blocks_in_use) == (10, 7, 3)
    assert load.shared.prefill_tokens_per_s == 1000
    assert load.shared.peer_bytes_per_s == 0
    await scene.until(lambda: scene.reports)


def finishes(scene: _Scene, name: str) -> list[FinishReason | None]:
    outputs = [output for report in scene.reports for output in report.result.outputs]
    return [output.finish for output in outputs if output.request_id == name]


async def test_a_prompt_is_handed_over_when_its_blocks_are_in_the_store(scene):
    scene.submit("a", hand_over=True)
    await scene.put("a", output(7, finish="length"))
    await scene.until(lambda: scene.waited)
    assert (scene.waited, finishes(scene, "a")) == ([NAMES[:1]], [])
    scene.stored.set()
    await scene.until(lambda: finishes(scene, "a"))
    (told,) = [report for report in scene.reports if report.exports]
    assert told.exports == (KvExport(RequestId("a"), RequestId("a"), num_tokens=6),)
    (handed,) = told.result.outputs
    assert (handed.finish, handed.tokens) == (FinishReason.HANDED_OVER, [])


async def test_a_prefill_whose_first_token_is_the_last_hands_nothing_over(scene):
    scene.submit("a", hand_over=True)
    await scene.put("a", output(7, finish="stop"))
    await scene.until(lambda: finishes(scene, "a") == [FinishReason.STOP])
    assert not scene.waited


async def test_an_abort_while_blocks_are_being_stored(scene):
    scene.submit("a", hand_over=True)
    await scene.put("a", output(7, finish="length"))
    await scene.until(lambda: scene.waited)
    scene.engine.abort(RequestId("a"))
    await scene.until(lambda: not scene.engine.load().shared.num_running and not scene.engine.load().shared.num_waiting)
    assert finishes(scene, "a") == []
