"""A tiny random model in Hugging Face's format, and short ways to build requests for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tanghulu.hashing import TokenSequence, root_hash
from tanghulu.session.outputs import Output
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import Fingerprint, RequestId
from tanghulu.workers.compute.models.model import Model, kv_dtype_name, load_model
from tanghulu.workers.compute.runners import TorchRunner
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.engine.scheduler import EngineCoreConfig
from tanghulu.workers.engine.step import Sampled
from tanghulu.workers.mock.loading import byte_level
from tanghulu.workers.weights import resolve_model

ROOT = root_hash(Fingerprint(b"0123456789abcdef"))
BLOCK = 8
VOCAB = 97
BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
    "bos_token_id": 0,
}


@dataclass(frozen=True)
class TinyModel:
    path: Path
    config: dict[str, Any]

    def load(self) -> Model:
        return load_model(resolve_model(str(self.path)), torch.float32)

    def reference(self) -> Any:
        """The same weights in transformers."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval()


#: Heads wide enough for a GPU's kernels, and weights small enough that bfloat16 keeps the logits close.
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}


def write_served(path: Path) -> TinyModel:
    """Write a model that a worker can serve: `WIDE`, with a byte-level tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "tokenizer.json").write_bytes(byte_level().tokenizer_json)
    return write_tiny(path, vocab_size=300, **WIDE)


def write_tiny(path: Path, seed: int = 0, shards: int = 1, **changes: Any) -> TinyModel:
    """Write config.json and random weights under ``path``."""
    config = BASE | changes
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _random(name, shape, generator) for name, shape in _shapes(config).items()}
    (path / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = [f"model-{index}.safetensors" for index in range(shards)]
    weight_map = {name: files[index % shards] for index, name in enumerate(names)}
    for file in files:
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, path / file, {"format": "pt"})
    if shards > 1:
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        (path / files[0]).rename(path / "model.safetensors")
    return TinyModel(path, config)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.1 * noise if "norm" in name else noise * 0.15


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv, dim = (
        config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, rows in (("q_proj", heads * dim), ("k_proj", kv * dim), ("v_proj", kv * dim)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
            if config["model_type"] == "qwen2":
                shapes[f"{layer}.self_attn.{name}.bias"] = (rows,)
        if config["model_type"] == "qwen3":
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (dim,) for name in "qk"}
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, heads * dim)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}.mlp.{name}.weight"] = (config["intermediate_size"], hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, config["intermediate_size"])
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def request(
    name: str,
    tokens: Iterable[int],
    max_new: int = 8,
    *,
    block_tokens: int = BLOCK,
    num_prompt: int | None = None,
    sampling: Sampling | None = None,
    stop: StopRule | None = None,
    **more: Any,
) -> EngineRequest:
    """A greedy request that ignores end tokens unless told otherwise."""
    sequence = TokenSequence(ROOT, block_tokens, list(tokens))
    return EngineRequest(
        RequestId(name),
        sequence,
        num_prompt or len(sequence),
        sampling or Sampling(temperature=0),
        stop or StopRule(max_new, ignore_eos=True),
        **more,
    )


def sampled(tokens: Sequence[int]) -> Sampled:
    """What a runner draws where nobody asked for log probabilities."""
    return Sampled(list(tokens), [None] * len(tokens))


def runner_of(
    kind: Any,
    model: Model,
    *,
    block_tokens: int,
    kv_dtype: str = "auto",
    num_blocks: int = 0,
    kv_capacity_bytes: int = 0,
    num_parts: int = 1,
    **more: Any,
) -> Any:
    """A runner of ``kind`` with a cache of so many blocks or bytes."""
    layout = KvLayout.of(model.config, block_tokens, kv_dtype_name(kv_dtype, model.dtype), num_parts)
    return kind(model, layout, num_blocks or layout.num_blocks_in(kv_capacity_bytes), **more)


def engine(model: Model, num_blocks: int = 64, **more: Any) -> EngineCore:
    """An engine with small blocks and all checks on. Keywords of EngineCore go to it, others to EngineCoreConfig."""
    transfers = more.pop("transfers", None)
    config = {"block_tokens": BLOCK, "max_num_batched_tokens": 64, "max_num_seqs": 8, "debug_checks": True} | more
    capacity = num_blocks * KvLayout.of(model.config, config["block_tokens"], "float32").block_bytes
    buffer = config.pop("buffer", None)
    runner = runner_of(
        TorchRunner, model, block_tokens=config["block_tokens"], kv_capacity_bytes=capacity, buffer=buffer
    )
    return EngineCore(runner, EngineCoreConfig(**config), transfers)


def run_all(core: EngineCore, max_steps: int = 2000) -> dict[str, list[int]]:
    """Step until nothing is left to do; the new tokens of each request."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.scheduler.has_work:
            return tokens
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.tokens)
    raise AssertionError(f"not done after {max_steps} steps: {core!r}")


def outputs_of(core: EngineCore, max_steps: int = 2000) -> list[Output]:
    """Step until nothing is left to do; all outputs in order."""
    outputs: list[Output] = []
    for _ in range(max_steps):
        if not core.scheduler.has_work:
            return outputs
        outputs.extend(core.step().outputs)
    raise AssertionError("not done")
