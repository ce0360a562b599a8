"""Reads a model's numbers from GGUF metadata, as llama.cpp reads it.

llama.cpp's sources: https://github.com/ggml-org/llama.cpp, src/llama-model.cpp (`load_hparams`) and src/llama-arch.cpp,
which names every key that it reads. As in `hf_config`, a key is read below, known to be harmless, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import MAX_LAYERS, Fields
from tanghulu.workers.weights.model_config import ModelConfig, RopeScaling

#: GGUF's names of the supported architectures: a Mistral's file has llama.
GGUF_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_HARMLESS: Final = frozenset(
    {"rope.scaling.original_context_length", "rope.scaling.finetuned", "attention.layer_norm_epsilon"}
)
#: Tokens ending a turn that llama.cpp recognises by name if a file does not identify them.
_ENDS_BY_NAME: Final = ("<|eot_id|>", "<|im_end|>")


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: Iterable[str]) -> ModelConfig:
    """Read GGUF metadata; ``tensor_names`` show whether there are biases and a head of its own.

    Raises ModelUnsupported that names the key and its value: missing, malformed, or not computed by this worker.
    """
    general = Fields(metadata, "GGUF metadata")
    architecture = general.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelUnsupported(
            f"architecture {architecture!r} is not supported; this worker runs {', '.join(GGUF_ARCHITECTURES)} from "
            "GGUF"
        )
    _refuse_general(general, metadata)
    fields, names = Fields(metadata, "GGUF metadata", prefix=f"{architecture}."), frozenset(tensor_names)
    made = ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("block_count", most=MAX_LAYERS),
        hidden=fields.integer("embedding_length"),
        intermediate=fields.integer("feed_forward_length"),
        vocab=fields.integer("vocab_size", len(general.items("tokenizer.ggml.tokens", str))),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_context=_context(fields),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(fields),
        tie_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm=architecture == "qwen3",
        bos_id=min(general.ids("tokenizer.ggml.bos_token_id"), default=None),
        eos_ids=_ends(general),
        **_heads(fields),
    )
    fields.only("expert_count", 0)
    fields.only("expert_used_count", 0)
    fields.only("attention.causal", True)
    fields.only("pooling_type", 0)
    fields.only("rope.scaling.attn_factor", 1)
    fields.only("tensor_data_layout", "Meta AI original pth")
    fields.refuse_others(_HARMLESS)
    return made


def _refuse_general(general: Fields, metadata: Mapping[str, Any]) -> None:
    if (count := general.integer("split.count", 1, least=0)) > 1:
        raise ModelUnsupported(f"the model is split into {count} GGUF files; join them with gguf-split --merge")
    general.only("general.type", "model")
    for namespace in ("adapter.", "clip.", "diffusion."):
        Fields(metadata, "GGUF metadata", namespace).refuse_others()


def _heads(fields: Fields) -> dict[str, Any]:
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    if "attention.key_length" not in fields and hidden % heads:
        raise fields.unusable("attention.head_count", f"it must divide embedding_length {hidden}")
    head_dim = fields.integer("attention.key_length", hidden // heads)
    fields.only("attention.value_length", head_dim)
    fields.only("rope.dimension_count", head_dim)
    return {
        "num_heads": heads,
        "num_kv_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
    }


def _context(fields: Fields) -> int:
    # Inside its window, sliding-window attention equals full attention; so the window bounds the context.
    positions = fields.integer("context_length")
    return min(positions, fields.integer("attention.sliding_window", 0, least=0) or positions)


def _rope_scaling(fields: Fields) -> RopeScaling:
    # Llama 3's scaling is not here: GGUF ships its result as the tensor rope_freqs.weight.
    kind = fields.text("rope.scaling.type", "linear")
    older = fields.number("rope.scale_linear", 1.0, least=1)
    factor = fields.number("rope.scaling.factor", older, least=1)
    if kind not in ("none", "linear"):
        raise ModelUnsupported(f"rope scaling {kind!r} is not supported; this worker runs none and linear from GGUF")
    return RopeScaling() if kind == "none" or factor == 1 else RopeScaling("linear", factor=factor)


def _ends(general: Fields) -> frozenset[int]:
    ends = frozenset[int]()
    for name in ("eos", "eot", "eom"):
        ends |= general.ids(f"tokenizer.ggml.{name}_token_id")
    if "tokenizer.ggml.eot_token_id" not in general:
        tokens = general.items("tokenizer.ggml.tokens", str)
        ends |= {tokens.index(name) for name in _ENDS_BY_NAME if name in tokens}
    return ends
