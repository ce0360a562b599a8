"""The ways in which a request may be served, each of which has to give the same answer from a worker that is invariant.

Every way runs the same requests through engines and returns, of each, the tokens and the log probabilities.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import cast

import torch

from tanghulu.session.outputs import TokenLogprobs
from tanghulu.session.sampling import Sampling
from tanghulu.types import RequestId
from tanghulu.workers.compute.kv_cache import KvTensors
from tanghulu.workers.compute.models.model import Model, kv_dtype_name
from tanghulu.workers.compute.runners import TorchRunner
from tanghulu.workers.engine.engine import EngineCore, KvTransfers, ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.ngram_drafts import NgramProposer
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.step import FetchWanted, StepResult
from tests.workers.peers import export_at
from tests.workers.tiny import request, runner_of

#: Tokens and log probabilities of an answer.
Answer = tuple[list[int], list[TokenLogprobs | None]]
MakeRunner = Callable[[Model, int, int], ModelRunner]


def cpu_runner(model: Model, block_tokens: int, num_blocks: int, kv_dtype: str = "auto") -> ModelRunner:
    layout = KvLayout.of(model.config, block_tokens, kv_dtype_name(kv_dtype, model.dtype))
    capacity = num_blocks * layout.block_bytes
    return runner_of(TorchRunner, model, block_tokens=block_tokens, kv_dtype=kv_dtype, kv_capacity_bytes=capacity)


class Served:
    """Requests (prompt, sampling), each for ``num_new`` tokens, for the engines of ``model``."""

    def __init__(
        self,
        model: Model,
        prompts: Sequence[tuple[list[int], Sampling]],
        *,
        num_new: int,
        block_tokens: int = 8,
        make_runner: MakeRunner = cpu_runner,
        proposer: NgramProposer | None = None,
    ) -> None:
        self.prompts = prompts
        self.num_new = num_new
        self.block_tokens = block_tokens
        self._model, self._make_runner, self._proposer = model, make_runner, proposer
        longest = max(len(prompt) for prompt, _ in prompts) + num_new
        #: Blocks of the longest request.
        self.most_blocks = -(-longest // block_tokens)

    def engine(self, num_blocks: int, transfers: KvTransfers | None = None, **config: int) -> EngineCore:
        runner = self._make_runner(self._model, self.block_tokens, num_blocks)
        bounds = {"max_num_batched_tokens": 512} | config
        made = EngineCoreConfig(block_tokens=self.block_tokens, proposer=self._proposer, debug_checks=True, **bounds)
        core = EngineCore(runner, made, transfers)
        kv_of(core).view(torch.uint8).fill_(0xFF)  # NaN: of last owners a block may have anything
        return core

    def request(self, index: int, generated: Sequence[int] = ()) -> EngineRequest:
        """Request ``index``, or, behind ``generated`` tokens, what is left of it for another worker."""
        prompt, sampling = self.prompts[index]
        return request(
            str(index),
            [*prompt, *generated],
            self.num_new,
            block_tokens=self.block_tokens,
            num_prompt=len(prompt),
            sampling=sampling,
        )

    def alone(self) -> list[Answer]:
        answers = []
        for index in range(len(self.prompts)):
            answers += self.answers(self.engine(self.most_blocks + 1), [index])
        return answers

    def answers(self, core: EngineCore, indices: Sequence[int]) -> list[Answer]:
        """Add the requests at once; their answers when all are done."""
        for index in indices:
            core.add(self.request(index))
        found: dict[int, Answer] = {index: ([], []) for index in indices}
        while core.scheduler.has_work:
            collect(core, found)
        return in_order(found)


class Outside(KvTransfers):
    """Transfers from the engine that holds the export of a hand-over, its partial last block included."""

    can_fetch = True

    def __init__(self, holder: EngineCore) -> None:
        self._holder = holder
        self._wanted: list[FetchWanted] = []
        self.num_blocks = 0

    def fetch(self, wanted: FetchWanted) -> None:
        self._wanted.append(wanted)

    def pull(self, wanted: FetchWanted) -> None:
        raise AssertionError("nothing is pulled ahead")

    def arrive(self, core: EngineCore) -> None:
        """Copy all that was asked for."""
        while self._wanted:
            wanted = self._wanted.pop()
            export = self._holder.scheduler.exports.get(wanted.request_id)
            assert export is not None
            sources = export.block_ids[wanted.first_block :]
            for source, block in zip(sources, wanted.block_ids, strict=True):
                kv_of(core)[block] = kv_of(self._holder)[source]
            self.num_blocks += len(wanted.block_ids)
            core.fetch_done(wanted.request_id, len(wanted.block_ids))


def kv_of(core: EngineCore) -> torch.Tensor:
    return cast("KvTensors", core.cache).blocks


def batched(served: Served, **config: int) -> list[Answer]:
    """All in one engine, in another order, coming in by and by."""
    rng = random.Random(3)
    core = served.engine(served.most_blocks * len(served.prompts), **config)
    waiting = rng.sample(range(len(served.prompts)), len(served.prompts))
    found: dict[int, Answer] = {index: ([], []) for index in waiting}
    while waiting or core.scheduler.has_work:
        while waiting and (rng.random() < 0.4 or not core.scheduler.has_work):
            core.add(served.request(waiting.pop()))
        collect(core, found)
    return in_order(found)


def cached(served: Served) -> list[Answer]:
    """Each twice, one behind the other: the second finds all full blocks of the first one's prompt."""
    core = served.engine(served.most_blocks * len(served.prompts), max_num_batched_tokens=100)
    everybody = range(len(served.prompts))
    served.answers(core, everybody)
    found: dict[int, Answer] = {index: ([], []) for index in everybody}
    for index in everybody:
        core.add(served.request(index))
    while core.scheduler.has_work:
        for output in collect(core, found).outputs:
            full = (len(served.prompts[int(output.request_id)][0]) - 1) // served.block_tokens
            assert output.cached_tokens >= full * served.block_tokens
    return in_order(found)


def preempted(served: Served) -> list[Answer]:
    """Each beside an older request that outlasts it, in a cache with a block more than their prompts: both need one."""
    assert served.num_new > served.block_tokens + 1
    found: dict[int, Answer] = {}
    for index, (prompt, _) in enumerate(served.prompts):
        own, older = (-(-count // served.block_tokens) for count in (len(prompt), served.num_new))
        core = served.engine(own + older + 1, max_num_batched_tokens=4096)  # both are admitted before either grows
        filler = [(7 * at + index) % 80 + 5 for at in range(older * served.block_tokens)]
        core.add(request("older", filler, served.num_new + 2, block_tokens=served.block_tokens))
        core.add(served.request(index))
        found[index] = ([], [])
        was_preempted = False
        while core.scheduler.request(RequestId(str(index))) is not None:
            was_preempted |= bool(collect(core, found).preempted)
        assert was_preempted
    return in_order(found)


def handed_over(served: Served) -> list[Answer]:
    """Prompts by one engine, the rest by another from its KV."""
    size = served.most_blocks * len(served.prompts)
    prefill = served.engine(size, max_num_batched_tokens=70)
    found: dict[int, Answer] = {index: ([], []) for index in range(len(served.prompts))}
    for index in found:
        first = served.request(index)
        first.hold_kv = True
        prefill.add(first)
    while prefill.scheduler.has_work:
        collect(prefill, found)
    outside = Outside(prefill)
    decode = served.engine(size, outside)
    for index in found:
        rest = served.request(index, found[index][0])
        export = prefill.scheduler.exports.get(rest.request_id)
        assert export is not None
        rest.peer = export_at("prefill", rest.request_id, export.num_tokens)
        decode.add(rest)
    while decode.scheduler.has_work:
        collect(decode, found)
        outside.arrive(decode)
    assert outside.num_blocks > 0
    return in_order(found)


def moved(served: Served) -> list[Answer]:
    """Half of each answer by one engine; what is left is computed by another from the tokens alone."""
    size, half = served.most_blocks * len(served.prompts), served.num_new // 2
    first, second = served.engine(size, max_num_batched_tokens=50), served.engine(size)
    found: dict[int, Answer] = {index: ([], []) for index in range(len(served.prompts))}
    for index in found:
        first.add(served.request(index))
    while first.scheduler.has_work:
        for output in collect(first, found).outputs:
            index = int(output.request_id)
            if len(found[index][0]) == half:
                first.abort(output.request_id)
                second.add(served.request(index, found[index][0]))
        if second.scheduler.has_work:
            collect(second, found)
    while second.scheduler.has_work:
        collect(second, found)
    return in_order(found)


#: By name: what runs the requests so.
WAYS: dict[str, Callable[[Served], list[Answer]]] = {
    "batched": batched,
    "chunked-64": lambda served: batched(served, max_num_batched_tokens=64),
    "chunked-256": lambda served: batched(served, max_num_batched_tokens=256),
    "cached": cached,
    "preempted": preempted,
    "handed-over": handed_over,
    "moved": moved,
}


def collect(core: EngineCore, found: dict[int, Answer]) -> StepResult:
    """Step once and add what came out to ``found``."""
    result = core.step()
    for output in result.outputs:
        if output.request_id == "older":
            continue
        tokens, logprobs = found[int(output.request_id)]
        tokens += output.tokens
        logprobs += output.logprobs
    return result


def in_order(found: dict[int, Answer]) -> list[Answer]:
    return [found[index] for index in sorted(found)]
