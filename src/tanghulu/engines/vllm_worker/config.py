"""The options of ``tanghulu vllm-worker``, and their translation to vLLM's arguments. Imports nothing of vLLM."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tanghulu.auth.credentials import Credentials
from tanghulu.errors import ConfigError
from tanghulu.runtime.config import check_bounds, option
from tanghulu.runtime.kv_endpoints import EventEndpoints
from tanghulu.workers.sessions.port import SessionOptions

CONNECTOR = "TanghuluConnector"
CONNECTOR_MODULE = "tanghulu.engines.vllm.connector"
#: The class whose functions can be called in vLLM's processes.
EXTENSION = "tanghulu.engines.vllm_worker.extension.InVllmProcess"
#: Engine arguments set by this worker, with the option that sets them, if any.
_DECIDED = {
    "model": "--model",
    "dtype": "--dtype",
    "block_size": "--block-tokens",
    "kv_cache_memory_bytes": "--kv-memory",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "kv_transfer_config": "--store",
    "prefix_caching_hash_algo": "",
    "enable_prefix_caching": "",
    "kv_events_config": "",
    "worker_extension_cls": "",
    "disable_log_stats": "",
    "enable_logging_iteration_details": "",
    "data_parallel_size": "",
}


@dataclass(frozen=True, kw_only=True)
class VllmWorkerConfig(SessionOptions):
    """The options of a worker that computes with vLLM."""

    role: str = option(
        "worker",
        "prefill computes prompts; decode answers with the KV that a prefill worker stored; worker does both",
        choices=("worker", "prefill", "decode"),
    )
    model: str = option("", "a directory with safetensors, config.json and tokenizer.json", metavar="DIR")
    dtype: str = option("auto", "arithmetic and KV type", choices=("auto", "float32", "bfloat16", "float16"))
    kv_memory: int = option(0, "memory of vLLM's KV cache; 0 leaves it to vLLM", size=True)
    block_tokens: int = option(0, "tokens per block, equal for all workers that share KV; 0 leaves it to vLLM")
    max_num_batched_tokens: int = option(
        0, "limit on tokens per step, which bounds how long a prefill delays decodes; 0 leaves it to vLLM"
    )
    vllm: str = option("{}", "further engine arguments of vLLM as JSON, such as '{\"enforce_eager\": true}'")

    def __post_init__(self) -> None:
        check_bounds(self)
        SessionOptions.__post_init__(self)
        if not (Path(self.model).expanduser() / "config.json").is_file():
            raise ConfigError(
                f"--model is {self.model!r}; vLLM's worker needs a directory with config.json, tokenizer.json and "
                "safetensors"
            )
        if self.role != "worker" and not self.store:
            raise ConfigError(f"--role {self.role} hands prompts over through the store; drop --no-store")
        if self.event_endpoints is not None and "//*:" not in self.event_endpoints.events:
            raise ConfigError(f"--kv-events {self.kv_events}: vLLM listens at every interface only; write tcp://*:PORT")
        self.further_arguments()

    @property
    def folder(self) -> Path:
        """The directory of the model."""
        return Path(self.model).expanduser().resolve()

    def further_arguments(self) -> dict[str, Any]:
        """Return the arguments in ``--vllm``; raises ConfigError unless a JSON object without those set here."""
        try:
            given = json.loads(self.vllm)
        except ValueError as error:
            raise ConfigError(f"--vllm is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError('--vllm must be a JSON object of engine arguments, such as {"max_model_len": 4096}')
        for name in sorted(given.keys() & _DECIDED.keys()):
            instead = f"use {_DECIDED[name]}" if _DECIDED[name] else "the conductor depends on its value"
            raise ConfigError(f"--vllm cannot set {name}: {instead}")
        return given

    def engine_arguments(self, events: EventEndpoints) -> dict[str, Any]:
        """Return vLLM's engine arguments as plain values; vLLM publishes its KV events at ``events``."""
        arguments: dict[str, Any] = {
            "model": str(self.folder),
            "dtype": self.dtype,
            "prefix_caching_hash_algo": "sha256_cbor",
            "enable_prefix_caching": True,
            "worker_extension_cls": EXTENSION,
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events.events,
                "replay_endpoint": events.replay,
            },
            # Ours receives each step's figures; vLLM's own loggers, which log and count, are left out.
            "disable_log_stats": True,
            "enable_logging_iteration_details": True,
            # Requests' grammars use the dialect of the library that our engine uses, too.
            "structured_outputs_config": {"backend": "guidance"},
        }
        sizes = {
            "block_size": self.block_tokens,
            "kv_cache_memory_bytes": self.kv_memory,
            "max_num_batched_tokens": self.max_num_batched_tokens,
        }
        arguments |= {name: size for name, size in sizes.items() if size}
        if self.store:
            arguments["kv_transfer_config"] = self._transfer()
        return arguments | self.further_arguments()

    def _transfer(self) -> dict[str, Any]:
        shown: Credentials = self.credentials
        options = {
            "master": str(self.master),
            "tenant": shown.tenant,
            "token": shown.token,
            "tls_ca": shown.tls.ca,
            "tls_cert": shown.tls.cert,
            "tls_key": shown.tls.key,
            "cluster_secret": self.cluster_secret,
        }
        return {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {name: value for name, value in options.items() if value},
        }
