"""Tiny models that transformers writes, their config.json changed afterwards, and what both sides compute of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
from tests.workers.tiny import BLOCK

TOKENS = [2 + at * at % 95 for at in range(90)]
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
#: Values of every kind that JSON has.
ANYTHING: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 3.5, 1e-6, float("inf"), float("nan"), 10**12, 10**400),
    *("", "x", "linear", [], [0], [None], ["full_attention"], {}, {"x": 1}, {"rope_type": "linear", "factor": 2.0}),
]
#: transformers' configuration class of each architecture, and what it needs to be tiny.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 300}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]}),
}


def write(path: Path, architecture: str, **fields: Any) -> dict[str, Any]:
    """Have transformers write a random model of ``architecture`` under ``path``; return its config.json."""
    import transformers

    kind, more = KINDS[architecture]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(TINY | more | fields)))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:  # all alike when they are made
                weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(path, save_original_format=True)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def change(path: Path, config: dict[str, Any]) -> None:
    (path / "config.json").write_text(json.dumps(config))


def theirs(path: Path, count: int = len(TOKENS)) -> torch.Tensor:
    """transformers' logits of the last of ``count`` tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([TOKENS[:count]])).logits[0, -1]


def ours(path: Path, lora: str = "", count: int = len(TOKENS)) -> torch.Tensor:
    """This worker's logits of the last of ``count`` tokens; raises what loading raises."""
    model = load_model(resolve_model(str(path), lora), torch.float32)
    cache = KvCache(KvLayout.of(model.config, BLOCK, "float32"), 12)
    chunk = SequenceChunk(TOKENS[:count], 0, list(range(12)), wants_logits=True)
    return model.forward(build_forward_batch([chunk], BLOCK), cache)[0]
