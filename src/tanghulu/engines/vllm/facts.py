"""Facts that connector and tier read from vLLM's configuration: its compatibility, and the meaning of their bytes.

Takes vLLM's objects as they are and imports nothing of it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tanghulu.engines.common.names import digest_of_weights, facts_of_model, make_fingerprint
from tanghulu.errors import ConfigError
from tanghulu.hashing import DEFAULT_VLLM_SEED
from tanghulu.types import Fingerprint

#: Fields of a model's configuration that state its origin, without effect on what it computes.
_NOT_OF_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype")


def refuse_what_cannot_work(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ConfigError stating what to change if blocks could not be shared, or a failure would end requests."""
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if transfer.kv_load_failure_policy != "recompute":
        raise ConfigError(
            f'"kv_load_failure_policy" is {transfer.kv_load_failure_policy!r}, which fails a request when its load '
            'fails; set it to "recompute" in --kv-transfer-config'
        )
    if algorithm.startswith("xxhash") and "PYTHONHASHSEED" not in os.environ:
        raise ConfigError(
            f"block names of --prefix-caching-hash-algo {algorithm} differ between processes; use sha256_cbor, or set "
            "PYTHONHASHSEED to the same value everywhere"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError("blocks have no names without prefix caching; drop --no-enable-prefix-caching")
    if len(kv_cache_config.kv_cache_groups) != 1:
        num_groups = len(kv_cache_config.kv_cache_groups)
        raise ConfigError(
            f"the model has {num_groups} KV cache groups, and this connector supports one; try "
            "--disable-hybrid-kv-cache-manager"
        )
    if vllm_config.device_config.device_type not in ("cpu", "cuda"):
        raise ConfigError(
            f"this connector runs on CPUs and CUDA GPUs, not on {vllm_config.device_config.device_type!r}; use "
            "OffloadingConnector with TanghuluTier (docs/engines/vllm.md)"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ConfigError(f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: this connector supports only 1")


def fingerprint_of(vllm_config: Any, kv_cache_config: Any, namespace: str) -> Fingerprint:
    """Return the identity of a block's bytes: weights, configuration, types, blocks, layout, hashes; and namespace."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    (group,) = kv_cache_config.kv_cache_groups
    return make_fingerprint(
        {
            "engine": "vllm",
            "namespace": namespace,
            "weights": digest_of_weights(model.model, model.revision),
            "config": config,
            "dtype": str(model.dtype),
            "cache_dtype": cache.cache_dtype,
            "quantization": model.quantization,
            # With the type, and the order of a head's bytes where an attention backend has its own.
            "blocks": repr(group.kv_cache_spec),
            "page_bytes": group.kv_cache_spec.page_size_bytes,
            "layers": list(group.layer_names),
            "layout": kv_cache_config.kv_cache_layout,
            "device": vllm_config.device_config.device_type,
            "tensor_parallel": parallel.tensor_parallel_size,
            "decode_context_parallel": parallel.decode_context_parallel_size,
            "hash": cache.prefix_caching_hash_algo,
            "hash_root": os.environ.get("PYTHONHASHSEED", DEFAULT_VLLM_SEED),
        }
    )


def fingerprint_of_tier(config: Any, row_bytes: int, device: str, namespace: str) -> Fingerprint:
    """Return the identity of a chunk's bytes, as far as ``OffloadingConfig`` has it; and the namespace.

    Raises ConfigError for a model known by its name alone, as vLLM does not give its revision.
    """
    model, parallel = config.model, config.parallel
    if not Path(model.name).is_dir() and not namespace:
        raise ConfigError(
            f"vLLM does not report the revision of {model.name!r} to its tiers; set --model to a folder, or add "
            '"namespace": "<model and revision>" beside "master"'
        )
    return make_fingerprint(
        {
            "engine": "vllm tier",
            "namespace": namespace,
            **facts_of_model(model.name, None),
            "cache_dtype": model.dtype,
            "groups": [(each.group_id, each.tokens_per_block, list(each.layer_names)) for each in config.groups],
            "worker_bytes": config.worker_kv_bytes_per_block,
            "row_bytes": row_bytes,
            "hash_tokens": config.cache.tokens_per_hash,
            "chunk_blocks": config.cache.blocks_per_chunk,
            "layout": config.kv_cache_layout,
            "replicated": config.replicated_layout,
            "canonical": config.canonical_layout,
            "device": device,
            "ranks": parallel.world_size,
            "tensor_parallel": parallel.tp_size,
            "pipeline_parallel": parallel.pp_size,
            "prefill_context_parallel": parallel.pcp_size,
            "decode_context_parallel": parallel.dcp_size,
        }
    )
