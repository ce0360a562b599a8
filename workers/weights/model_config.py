"""What a model is, in numbers: the one description that weights, cache, rotary tables and scheduler agree on.

Owns the readers of the two places where checkpoints say it: GGUF metadata and Hugging Face's config.json.
Knows nothing of tensors, torch or files beyond the small JSON texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.errors import ModelUnsupported

#: Architectures that ``models.registry`` can run, with what sets them apart from plain Llama.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
#: What GGUF calls them: a Mistral's file says llama.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts beyond the trained one.

    ``kind`` is ``none``, ``linear`` (every frequency divided by ``factor``) or ``llama3`` (only wavelengths
    beyond ``original_context / low_freq_factor`` are; see Llama 3.1's model card).
    """

    kind: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A dense decoder-only transformer of the Llama family. Counts are whole-model, before any parallel split."""

    architecture: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rms_eps: float
    max_context: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    bos_id: int | None = None
    eos_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelUnsupported(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelUnsupported(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def kv_token_elements(self) -> int:
        """Elements of K and V of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read Hugging Face's ``config.json`` (and ``generation_config.json``, for further end tokens).

    Raises ModelUnsupported that names the architecture, rope type or missing key.
    """
    architecture = str(config.get("model_type", "absent"))
    _require_known(architecture, ARCHITECTURES)
    _refuse_others(config)
    fields = _Fields(config, "config.json")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    theta, scaling = _hf_rope(config)
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=fields.integer("head_dim", hidden // heads),
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=_hf_context(config, fields.integer("max_position_embeddings", 2048)),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias or architecture == "qwen2",
        output_bias=bias,
        qk_norm=architecture == "qwen3",
        bos_id=_first_id(config.get("bos_token_id")),
        eos_ids=_ids(config.get("eos_token_id")) | _ids((generation or {}).get("eos_token_id")),
    )


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: Iterable[str]) -> ModelConfig:
    """Read GGUF metadata; ``tensor_names`` tell whether the output layer shares the embedding's weights.

    Raises ModelUnsupported that names the architecture or the missing key, or for one file of several.
    """
    architecture = str(metadata.get("general.architecture", "absent"))
    _require_known(architecture, GGUF_ARCHITECTURES, " from GGUF")
    if metadata.get("split.count", 0) > 1:
        raise ModelUnsupported(f"this is one GGUF file of {metadata['split.count']}; join them (gguf-split --merge)")
    fields = _Fields(metadata, "GGUF metadata", prefix=f"{architecture}.")
    names = frozenset(tensor_names)
    hidden, heads = fields.integer("embedding_length"), fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", fields.integer("rope.dimension_count", hidden // heads))
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("block_count"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=fields.integer("feed_forward_length"),
        vocab=fields.integer("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        rms_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        max_context=_gguf_context(fields),
        rope_theta=fields.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(fields),
        tie_embeddings="output.weight" not in names,
        attention_bias="blk.0.attn_q.bias" in names,
        output_bias="blk.0.attn_output.bias" in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        bos_id=_first_id(metadata.get("tokenizer.ggml.bos_token_id")),
        eos_ids=frozenset(int(end) for end in ends if end is not None),
    )


class _Fields:
    """Typed access to a checkpoint's fields, with an error that names the missing one."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self._values, self._where, self._prefix = values, where, prefix

    def _get(self, name: str, default: float | None) -> Any:
        value = self._values.get(self._prefix + name)
        if value is None:
            value = default
        if not isinstance(value, int | float):
            raise ModelUnsupported(f"{self._where} has no usable {self._prefix + name!r} (found {value!r})")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        return int(self._get(name, default))

    def number(self, name: str, default: float | None = None) -> float:
        return float(self._get(name, default))

    def text(self, name: str, default: str) -> str:
        return str(self._values.get(self._prefix + name, default))


def _require_known(architecture: str, known: Sequence[str], source: str = "") -> None:
    if architecture not in known:
        raise ModelUnsupported(
            f"architecture {architecture!r} cannot be run; this worker runs {', '.join(known)}{source}"
        )


def _refuse_others(config: Mapping[str, Any]) -> None:
    """Raise ModelUnsupported if the config asks for something that would be passed over and change the results."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rotary = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    found = {
        "quantization_config": config.get("quantization_config"),
        "mlp_bias": config.get("mlp_bias"),
        "hidden_act": None if config.get("hidden_act") in (None, "silu") else config["hidden_act"],
        "partial_rotary_factor": None if float(rotary) == 1.0 else rotary,
    }
    for name, value in found.items():
        if value:
            raise ModelUnsupported(f"config.json has {name} {value!r}, which this worker does not compute")


def _hf_context(config: Mapping[str, Any], positions: int) -> int:
    # Inside its window, sliding-window attention equals full attention; so the window bounds the context.
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return positions
    return min(positions, int(window))


def _gguf_context(fields: _Fields) -> int:
    positions = fields.integer("context_length")
    return min(positions, fields.integer("attention.sliding_window", 0) or positions)


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    # transformers 5 writes rope_parameters with the base inside; older files rope_theta and rope_scaling.
    values: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(values.get("rope_type", values.get("type", "default")))
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", factor=float(values["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=float(values["factor"]),
            low_freq_factor=float(values["low_freq_factor"]),
            high_freq_factor=float(values["high_freq_factor"]),
            original_context=int(values["original_max_position_embeddings"]),
        )
    raise ModelUnsupported(f"rope scaling {kind!r} cannot be run; this worker runs default, linear and llama3")


def _gguf_rope_scaling(fields: _Fields) -> RopeScaling:
    # Llama 3's scaling does not stand here: GGUF ships its result as the tensor rope_freqs.weight.
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor=fields.number("rope.scaling.factor"))
    raise ModelUnsupported(f"rope scaling {kind!r} cannot be run; this worker runs none and linear from GGUF")


def _ids(value: object) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(item) for item in value) if isinstance(value, list) else frozenset({int(str(value))})


def _first_id(value: object) -> int | None:
    return next(iter(sorted(_ids(value))), None)
