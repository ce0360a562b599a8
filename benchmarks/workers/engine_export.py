"""Write SmolLM2 out of its GGUF as a safetensors directory, so that peers can load the very weights that we run."""

from __future__ import annotations

import json
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from tanghulu.workers.weights import ModelSource, resolve_model
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets


def tensor_names(num_layers: int) -> list[str]:
    inner = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    inner += ["input_layernorm", "post_attention_layernorm"]
    layers = [f"model.layers.{index}.{name}.weight" for index in range(num_layers) for name in inner]
    return ["model.embed_tokens.weight", "model.norm.weight", *layers]


def config_json(source: ModelSource, dtype: torch.dtype) -> dict[str, object]:
    config = source.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_id,
        "eos_token_id": sorted(config.eos_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def export(spec: str, path: Path, dtype: torch.dtype) -> Path:
    """Write config.json, tokenizer.json and model.safetensors under ``path`` unless they are there."""
    if (path / "model.safetensors").exists():
        return path
    path.mkdir(parents=True, exist_ok=True)
    source = resolve_model(spec)
    weights = source.open_weights()
    tensors = {name: weights.tensor(name).to(dtype).contiguous() for name in tensor_names(source.config.num_layers)}
    weights.close()
    (path / "config.json").write_text(json.dumps(config_json(source, dtype), indent=2))
    (path / "tokenizer.json").write_bytes(load_tokenizer_assets(source).tokenizer_json)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--model", default="smollm2", show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
def main(path: Path, model: str, dtype: str) -> None:
    """Write the model to PATH."""
    print(export(model, path, getattr(torch, dtype)))


if __name__ == "__main__":
    main()
