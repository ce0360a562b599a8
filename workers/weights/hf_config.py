"""Reads a model's numbers from Hugging Face's ``config.json``, as transformers reads it.

Each key is in one of three places: read below, with the supported values; in ``_HARMLESS``, keys without effect on the
forward pass; or it makes the load fail by its name, unless it is null, false or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tanghulu.errors import ModelUnsupported
from tanghulu.model_files.fields import MAX_LAYERS, Fields, names_in
from tanghulu.workers.weights.model_config import ModelConfig, RopeScaling, RoutedExperts, SlidingWindow

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class _Family:
    """Distinguishing features of an architecture: transformers' values for absent keys, biases, norms of heads.

    None is derived: as many KV heads as heads, ``hidden_size`` divided among the heads. ``biases`` are attention's:
    ``optional`` ones follow ``attention_bias``.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    positions: int = 2048
    eps: float = 1e-6
    theta: float = 10000.0
    window: int | None = None
    window_is_optional: bool = False
    biases: Literal["optional", "qkv", "none"] = "optional"
    qk_norm: bool = False


#: Supported architectures, by ``model_type``.
FAMILIES: Final = {
    "llama": _Family(),
    "mistral": _Family(8, None, 131_072, window=4096, biases="none"),
    "qwen2": _Family(32, None, 32_768, window=4096, window_is_optional=True, biases="qkv"),
    "qwen3": _Family(32, 128, 32_768, window=4096, window_is_optional=True, qk_norm=True),
    "mixtral": _Family(8, None, 131_072, eps=1e-5, theta=1e6, biases="none"),
    "qwen3_moe": _Family(4, None, 32_768, window=4096, window_is_optional=True, qk_norm=True),
    "gemma3_text": _Family(4, 256, 131_072, theta=1e6, window=4096, qk_norm=True),
}
#: Keys of transformers' PretrainedConfig, of its configuration classes for these architectures, of generation and of
#: tools, without effect on a forward pass outside training.
_HARMLESS: Final = names_in(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _experts_implementation
    _experts_implementation_internal _flash_attn_2_enabled _from_model_config _name_or_path _sliding_window_pattern
    architectures attn_implementation auto_map chunk_size_feed_forward dtype experts_implementation finetuning_task
    id2label is_decoder is_llama_config label2id name_or_path num_labels output_attentions output_hidden_states
    problem_type return_dict task_specific_params tf_legacy_loss tie_last_hidden_states tokenizer_class torch_dtype
    torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version use_bfloat16 use_return_dict

    attention_dropout attn_pdrop dropout embd_pdrop hidden_dropout initializer_range max_sequence_length
    max_window_layers model_max_length output_router_logits pretraining_tp resid_pdrop router_aux_loss_coef
    router_jitter_noise tokenizer_model_max_length tokenizer_padding_side use_cache

    assistant_confidence_threshold assistant_lookbehind bad_words_ids begin_suppress_tokens cache_implementation
    decoder_start_token_id diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length min_p no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_scores
    pad_token_id prefix remove_invalid_values repetition_penalty return_dict_in_generate sep_token_id suppress_tokens
    target_lookbehind temperature top_k top_p typical_p
    """
)


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``, for further end tokens).

    Raises ModelUnsupported that names the key and its value: missing, malformed, or not computed by this worker.
    """
    fields = Fields(config, "config.json")
    architecture = fields.text("model_type")
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelUnsupported(
            f"architecture {architecture!r} is not supported; this worker runs {', '.join(FAMILIES)} from safetensors"
        )
    is_gemma = architecture == "gemma3_text"
    read = _gemma(fields, family) if is_gemma else _plain(fields, family)
    _refuse_values(fields, family, is_gemma)
    read |= _attention(fields, family) | _tokens(fields, generation)
    made = ModelConfig(
        architecture=architecture,
        num_layers=_num_layers(fields),
        hidden=fields.integer("hidden_size"),
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", family.eps),
        tie_embeddings=fields.flag("tie_word_embeddings", is_gemma),
        experts=_experts(fields, architecture),
        **read,
    )
    fields.refuse_others(_HARMLESS)
    return made


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=MAX_LAYERS)


def _attention(fields: Fields, family: _Family) -> dict[str, Any]:
    heads = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim", family.head_dim)
    if head_dim is None:
        hidden = fields.integer("hidden_size")
        if hidden % heads:
            raise fields.unusable("num_attention_heads", f"it must divide hidden_size {hidden}")
        head_dim = hidden // heads
    # Where the architecture's biases are fixed, transformers ignores the key; unused tensors are refused.
    bias = fields.flag("attention_bias") and family.biases == "optional"
    return {
        "num_heads": heads,
        "num_kv_heads": fields.optional_integer("num_key_value_heads", family.kv_heads) or heads,
        "head_dim": head_dim,
        "attention_bias": bias or family.biases == "qkv",
        "output_bias": bias,
        "qk_norm": family.qk_norm,
    }


def _tokens(fields: Fields, generation: Mapping[str, Any] | None) -> dict[str, Any]:
    ends = fields.ids("eos_token_id")
    if generation is not None:
        ends |= Fields(generation, "generation_config.json").ids("eos_token_id")
    return {"bos_id": min(fields.ids("bos_token_id"), default=None), "eos_ids": ends}


def _experts(fields: Fields, architecture: str) -> RoutedExperts | None:
    if architecture not in ("mixtral", "qwen3_moe"):
        return None
    is_mixtral = architecture == "mixtral"
    name, other = ("num_local_experts", "num_experts")[:: 1 if is_mixtral else -1]
    count = fields.integer(name if name in fields else other)
    fields.only(name, count)
    fields.only(other, count)
    step, dense = 1, list[int]()
    if not is_mixtral:
        step, dense = fields.integer("decoder_sparse_step", 1), fields.items("mlp_only_layers", int)
    return RoutedExperts(
        count=count,
        per_token=fields.integer("num_experts_per_tok"),
        intermediate=fields.integer("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        normalised=is_mixtral or fields.flag("norm_topk_prob"),
        dense_layers=frozenset(layer for layer in range(_num_layers(fields)) if layer in dense or (layer + 1) % step),
    )


def _plain(fields: Fields, family: _Family) -> dict[str, Any]:
    """Return rotary embedding and context of all but Gemma."""
    theta = fields.number("rope_theta", family.theta)
    section = _rope_section(fields)
    positions = fields.integer("max_position_embeddings", family.positions)
    theta, scaling = _rope(section, theta, positions, old_name=True) if section is not None else (theta, RopeScaling())
    return {"rope_theta": theta, "rope_scaling": scaling, "max_context": _context(fields, family, positions)}


def _context(fields: Fields, family: _Family, positions: int) -> int:
    # Inside its window, sliding-window attention equals full attention; so the window bounds the context.
    window = fields.optional_integer("sliding_window", family.window)
    if family.window_is_optional and not fields.flag("use_sliding_window"):
        window = None
    kinds = _layer_types(fields)
    if _SLIDING in kinds and window is None:
        raise fields.unusable("layer_types", "it names sliding layers, but no sliding_window is set")
    if kinds and _SLIDING not in kinds and family.window_is_optional:
        window = None
    return positions if window is None else min(positions, window)


def _layer_types(fields: Fields) -> list[str]:
    kinds: list[str] = fields.items("layer_types", str)
    num_layers = _num_layers(fields)
    if kinds and (len(kinds) != num_layers or not {_SLIDING, _FULL}.issuperset(kinds)):
        raise fields.unusable("layer_types", f"it must be {_FULL!r} or {_SLIDING!r} for each of {num_layers} layers")
    return kinds


def _rope_section(fields: Fields) -> Fields | None:
    """Return the rotary embedding's parameters: ``rope_parameters`` since transformers 5, ``rope_scaling`` before."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is not None and old is not None:
        raise fields.unusable("rope_scaling", "rope_parameters is set, too; keep one of them")
    return new or old


def _rope(section: Fields, theta: float, positions: int, *, old_name: bool) -> tuple[float, RopeScaling]:
    """Return base and scaling in ``section``; ``old_name``: ``type`` replaces a missing ``rope_type``."""
    kind = section.text("rope_type", section.text("type", "default") if old_name else "default")
    section.only("type", kind)
    section.only("partial_rotary_factor", None, 1)
    theta, scaling = section.number("rope_theta", theta), RopeScaling()
    if kind == "linear":
        scaling = RopeScaling("linear", factor=section.number("factor", least=1))
    elif kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            factor=section.number("factor", least=1),
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
            original_context=section.integer("original_max_position_embeddings", positions),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise section.unusable("high_freq_factor", f"it must be above low_freq_factor {scaling.low_freq_factor}")
    elif kind != "default":
        raise ModelUnsupported(f"rope scaling {kind!r} is not supported; this worker runs default, linear and llama3")
    section.refuse_others()
    return theta, scaling


def _gemma(fields: Fields, family: _Family) -> dict[str, Any]:
    """Return the features specific to Gemma 3: norms, scales, and layers with a sliding window."""
    num_layers, positions = _num_layers(fields), fields.integer("max_position_embeddings", 131_072)
    pattern = fields.integer("sliding_window_pattern", 6)
    kinds = _layer_types(fields) or [_SLIDING if (at + 1) % pattern else _FULL for at in range(num_layers)]
    theta, local = fields.number("rope_theta", family.theta), fields.number("rope_local_base_freq", 10000.0)
    full, own = fields.section("rope_scaling"), None
    if (both := fields.section("rope_parameters")) is not None:
        if full is not None:
            raise fields.unusable("rope_scaling", "rope_parameters is set, too; keep one of them")
        full, own = both.section(_FULL), both.section(_SLIDING)
        both.refuse_others()
    theta, scaling = (theta, RopeScaling()) if full is None else _rope(full, theta, positions, old_name=False)
    local, stretched = (local, RopeScaling()) if own is None else _rope(own, local, positions, old_name=False)
    if stretched != RopeScaling():
        raise ModelUnsupported(f"rope scaling {stretched.kind!r} is not supported in layers with a sliding window")
    sliding = frozenset(layer for layer in range(num_layers) if kinds[layer] == _SLIDING)
    window = fields.optional_integer("sliding_window", family.window)
    if sliding and window is None:
        raise fields.unusable("sliding_window", f"it must be set: {len(sliding)} layers have a window")
    head_dim = fields.integer("head_dim", family.head_dim)
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_context": positions,
        "sliding": SlidingWindow(window, sliding, local) if sliding and window is not None else None,
        "activation": "gelu_tanh",
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "norm_offset": 1.0,
        "query_scale": (head_dim / fields.number("query_pre_attn_scalar", 256)) ** 0.5,
        "sandwich_norms": True,
    }


def _refuse_values(fields: Fields, family: _Family, is_gemma: bool) -> None:
    """Raise ModelUnsupported for unsupported values of keys that also have supported ones."""
    if is_gemma:
        fields.only("hidden_activation", "gelu_pytorch_tanh")
        fields.only("hidden_act", None, "gelu_pytorch_tanh")
    else:
        fields.only("hidden_act", "silu", "swish")
    fields.only("is_causal", True)
    fields.only("partial_rotary_factor", None, 1)
    fields.only("num_nextn_predict_layers", None, 0)
    fields.only("shared_expert_intermediate_size", None, 0)
    fields.only("qkv_bias", None, family.biases == "qkv")
    fields.only("use_qk_norm", None, family.qk_norm)
