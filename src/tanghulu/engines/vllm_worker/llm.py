"""Starts vLLM's engine, and translates to its types: the only file of the worker that imports vLLM (0.32)."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tanghulu.engines.vllm_worker.engine import VllmSurface
from tanghulu.engines.vllm_worker.requests import VllmRequest
from tanghulu.errors import ConfigError, NodeUnavailable
from tanghulu.types import Fingerprint

#: Set before vLLM is imported: events carry whole names, and its processes are spawned rather than forked from this
#: one, in which threads run.
_VARIABLES = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
FACTS_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """Facts known once vLLM has loaded its model."""

    fingerprint: Fingerprint
    block_tokens: int
    block_bytes: int
    num_blocks: int
    max_num_seqs: int  # in one step
    num_ranks: int  # each of which has a part of every block
    dtype: str
    context_length: int
    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]


class StatsRelay:
    """Forwards vLLM's statistics of each step, once a listener is set."""

    def __init__(self) -> None:
        self.listen: Callable[[Any], None] = lambda stats: None


def require_vllm() -> None:
    """Raise ConfigError if vLLM is not installed here."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("package vllm is not installed; run tanghulu vllm-worker in vLLM's environment")


class LoadedVllm:
    """A running ``AsyncLLM``; made in a thread, used on the event loop."""

    def __init__(self, arguments: dict[str, Any], relay: StatsRelay) -> None:
        os.environ.update(_VARIABLES)
        # It seeds vLLM's hashes, and the conductor uses vLLM's default: names would not agree.
        os.environ.pop("PYTHONHASHSEED", None)
        require_vllm()
        import vllm

        self._vllm = vllm
        self._llm = _start(arguments, relay)

    @property
    def by_priority(self) -> bool:
        return bool(self._llm.vllm_config.scheduler_config.policy == "priority")

    @property
    def on_cpu(self) -> bool:
        return bool(self._llm.vllm_config.device_config.device_type == "cpu")

    def surface(self) -> VllmSurface:
        """Return the parts of vLLM that requests need."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        return VllmSurface(self._llm, _sampling_params, EngineDeadError, (VLLMClientError, ValueError))

    async def facts(self, namespace: str) -> VllmFacts:
        """Collect facts from vLLM's processes; raises ConfigError for a model that this worker cannot describe."""
        found = await self._ask("tanghulu_facts", namespace)
        await self._ask("tanghulu_end_with", os.getpid())
        first = found[0]
        if first["num_groups"] != 1:
            raise ConfigError(f"the model has {first['num_groups']} KV cache groups; a vLLM worker supports one")
        if any(each != first for each in found):
            raise NodeUnavailable(f"vLLM's ranks report different caches: {found}")
        model = self._llm.model_config
        return VllmFacts(
            fingerprint=Fingerprint(bytes.fromhex(first["fingerprint"])),
            block_tokens=first["block_tokens"],
            block_bytes=first["block_bytes"],
            num_blocks=first["num_blocks"],
            max_num_seqs=self._llm.vllm_config.scheduler_config.max_num_seqs,
            num_ranks=len(found),
            dtype=str(model.dtype).removeprefix("torch."),
            context_length=model.max_model_len,
            vocab_size=model.get_vocab_size(),
            bos_id=getattr(model.hf_config, "bos_token_id", None),
            eos_ids=_ids(getattr(model.hf_config, "eos_token_id", None))
            | _ids(model.try_get_generation_config().get("eos_token_id"))
            | _ids(getattr(self._llm.get_tokenizer(), "eos_token_id", None)),
        )

    async def _ask(self, name: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = await self._llm.collective_rpc(name, FACTS_TIMEOUT_S, arguments)
        return answers

    @staticmethod
    def break_off() -> None:
        """End the processes of a starting vLLM: its constructor, in another thread, then fails."""
        for child in multiprocessing.active_children():
            child.kill()

    def close(self) -> None:
        """End vLLM's processes; takes seconds."""
        self._llm.shutdown()


def _start(arguments: dict[str, Any], relay: StatsRelay) -> Any:
    from vllm.config import KVEventsConfig, KVTransferConfig, StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Relayed(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *more: Any, **named: Any) -> None:
            relay.listen(scheduler_stats)

        def log_engine_initialized(self) -> None:
            pass

    given = dict(arguments)
    given["kv_events_config"] = KVEventsConfig(**given["kv_events_config"])
    given["structured_outputs_config"] = StructuredOutputsConfig(**given["structured_outputs_config"])
    if "kv_transfer_config" in given:
        given["kv_transfer_config"] = KVTransferConfig(**given["kv_transfer_config"])
    try:
        made = AsyncEngineArgs(**given)
    except TypeError as error:
        raise ConfigError(f"vLLM does not know an argument in --vllm: {error}") from error
    try:
        return AsyncLLM.from_engine_args(made, stat_loggers=[Relayed])
    except ValueError as error:
        raise ConfigError(f"vLLM rejected this configuration: {error}") from error
    except RuntimeError as error:
        raise NodeUnavailable(f"vLLM did not start (see its log): {error}") from error


def _sampling_params(request: VllmRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    bounds = StructuredOutputsParams(**request.grammar) if request.grammar is not None else None
    return SamplingParams(**request.sampling, output_kind=RequestOutputKind.DELTA, structured_outputs=bounds)


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list | tuple) else frozenset((value,))
