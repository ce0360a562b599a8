"""What a model is, in numbers: the one description that weights, cache, rotary tables and scheduler agree on.

Owns the readers of the two places where checkpoints say it: GGUF metadata and Hugging Face's config.json.
Knows nothing of tensors, torch or files beyond the small JSON texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.errors import ModelUnsupported

#: Architectures that ``models.registry`` can run; what sets them apart from plain Llama is read into `ModelConfig`.
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text")
_SLIDING, _FULL = "sliding_attention", "full_attention"
#: Where config.json says the activation of an MLP, and the one that is computed, if not SiLU as ``hidden_act``.
_ACTIVATION_KEYS = {"gemma3_text": ("hidden_activation", "gelu_pytorch_tanh")}
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
class RoutedExperts:
    """MLPs of which a router picks ``per_token`` of ``count`` for each token, by the softmax of its logits.

    ``intermediate`` is the width of one. ``normalised``: the weights of those picked add up to 1. ``dense_layers`` have
    one ordinary MLP instead.
    """

    count: int
    per_token: int
    intermediate: int
    normalised: bool
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 0 < self.per_token <= self.count:
            raise ModelUnsupported(f"a router cannot pick {self.per_token} of {self.count} experts")


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """``layers`` in which a token sees only the last ``num_tokens`` positions, its own included.

    Their rotary frequencies have a base of their own and are not stretched.
    """

    num_tokens: int
    layers: frozenset[int]
    rope_theta: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ModelUnsupported(f"a sliding window of {self.num_tokens} tokens sees nothing")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Counts are whole-model, before any parallel split.

    Gemma's own: embeddings are multiplied by ``embedding_scale``, norms by their weight plus ``norm_offset``, queries
    by ``query_scale`` beyond one over the root of ``head_dim``; ``sandwich_norms`` also norm what attention and MLP
    give, before it is added. ``activation`` is ``silu`` or ``gelu_tanh``.
    """

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
    experts: RoutedExperts | None = None
    sliding: SlidingWindow | None = None
    activation: str = "silu"
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    query_scale: float = 1.0
    sandwich_norms: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ModelUnsupported(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelUnsupported(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    @property
    def kv_token_elements(self) -> int:
        """Elements of K and V of one token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    def experts_of(self, layer: int) -> RoutedExperts | None:
        """The experts of ``layer``; None if it has one ordinary MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def mlp_widths(self) -> frozenset[int]:
        """The intermediate widths of the MLPs that there are."""
        found = (self.experts_of(layer) for layer in range(self.num_layers))
        return frozenset(self.intermediate if experts is None else experts.intermediate for experts in found)

    @property
    def mlp_elements(self) -> int:
        """Elements of the weights of all layers' MLPs and routers."""
        return self._mlp_elements(active=False)

    @property
    def active_mlp_elements(self) -> int:
        """The part of `mlp_elements` that a token is multiplied by."""
        return self._mlp_elements(active=True)

    def _mlp_elements(self, *, active: bool) -> int:
        total = 0
        for layer in range(self.num_layers):
            experts = self.experts_of(layer)
            if experts is None:
                total += 3 * self.hidden * self.intermediate
            else:
                used = experts.per_token if active else experts.count
                total += self.hidden * (3 * used * experts.intermediate + experts.count)
        return total

    @property
    def mlp_row_elements(self) -> int:
        """Elements of what an MLP computes of one token, in the layer where that is most."""
        widest = 3 * self.intermediate
        if self.experts is None:
            return widest
        return max(widest, self.experts.per_token * (3 * self.experts.intermediate + 3 * self.hidden))


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read Hugging Face's ``config.json`` (and ``generation_config.json``, for further end tokens).

    Raises ModelUnsupported that names the architecture, rope type or missing key.
    """
    architecture = str(config.get("model_type", "absent"))
    _require_known(architecture, ARCHITECTURES)
    _refuse_others(config)
    fields = _Fields(config, "config.json")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    is_gemma = architecture == "gemma3_text"
    num_layers, head_dim = fields.integer("num_hidden_layers"), fields.integer("head_dim", hidden // heads)
    positions = fields.integer("max_position_embeddings", 2048)
    theta, scaling = _hf_rope(config, 1e6 if architecture in ("mixtral", "gemma3_text") else 10000.0)
    bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=fields.integer("intermediate_size"),
        vocab=fields.integer("vocab_size"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        max_context=positions if is_gemma else _hf_context(config, positions),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=bool(config.get("tie_word_embeddings", is_gemma)),
        attention_bias=bias or architecture == "qwen2",
        output_bias=bias,
        qk_norm=architecture in ("qwen3", "qwen3_moe", "gemma3_text"),
        bos_id=_first_id(config.get("bos_token_id")),
        eos_ids=_ids(config.get("eos_token_id")) | _ids((generation or {}).get("eos_token_id")),
        experts=_hf_experts(config, fields, num_layers),
        **(_gemma_fields(config, fields, num_layers, head_dim) if is_gemma else {}),
    )


def _hf_experts(config: Mapping[str, Any], fields: _Fields, num_layers: int) -> RoutedExperts | None:
    architecture = config["model_type"]
    if architecture not in ("mixtral", "qwen3_moe"):
        return None
    is_mixtral = architecture == "mixtral"
    step, dense = (1, ()) if is_mixtral else (fields.integer("decoder_sparse_step", 1), config.get("mlp_only_layers"))
    return RoutedExperts(
        count=fields.integer("num_experts" if "num_experts" in config else "num_local_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        intermediate=fields.integer("intermediate_size" if is_mixtral else "moe_intermediate_size"),
        normalised=is_mixtral or bool(config.get("norm_topk_prob", False)),
        dense_layers=frozenset(layer for layer in range(num_layers) if layer in (dense or ()) or (layer + 1) % step),
    )


def _gemma_fields(config: Mapping[str, Any], fields: _Fields, num_layers: int, head_dim: int) -> dict[str, Any]:
    """What Gemma 3 has beside the others: norms, scales, and layers with a sliding window."""
    pattern = fields.integer("sliding_window_pattern", 6)  # every so many layers one sees everything
    kinds = config.get("layer_types") or [_SLIDING if (at + 1) % pattern else _FULL for at in range(num_layers)]
    if len(kinds) < num_layers or not set(kinds) <= {_SLIDING, _FULL}:
        raise ModelUnsupported(f"config.json has layer_types {kinds!r} for {num_layers} layers")
    own = ((config.get("rope_parameters") or {}).get(_SLIDING)) or {}
    if own.get("rope_type", "default") != "default":
        raise ModelUnsupported(f"rope scaling {own['rope_type']!r} in layers with a sliding window cannot be run")
    sliding = frozenset(layer for layer in range(num_layers) if kinds[layer] == _SLIDING)
    theta = float(own.get("rope_theta") or fields.number("rope_local_base_freq", 10000.0))
    return {
        "sliding": SlidingWindow(fields.integer("sliding_window"), sliding, theta) if sliding else None,
        "activation": "gelu_tanh",
        "embedding_scale": fields.integer("hidden_size") ** 0.5,
        "norm_offset": 1.0,
        "query_scale": (head_dim / fields.number("query_pre_attn_scalar", 256)) ** 0.5,
        "sandwich_norms": True,
    }


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: Iterable[str]) -> ModelConfig:
    """Read GGUF metadata; ``tensor_names`` tell whether the output layer shares the embedding's weights.

    Raises ModelUnsupported that names the architecture or the missing key, or for one file of several.
    """
    architecture = str(metadata.get("general.architecture", "absent"))
    _require_known(architecture, GGUF_ARCHITECTURES, " from GGUF")
    if metadata.get("split.count", 0) > 1:
        raise ModelUnsupported(f"this is one GGUF file of {metadata['split.count']}; join them (gguf-split --merge)")
    fields = _Fields(metadata, "GGUF metadata", prefix=f"{architecture}.")
    if fields.integer("expert_count", 0):
        raise ModelUnsupported("routed experts (expert_count) cannot be run from GGUF; give a directory of safetensors")
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
    name, known = _ACTIVATION_KEYS.get(str(config.get("model_type")), ("hidden_act", "silu"))
    found = {
        "quantization_config": config.get("quantization_config"),
        "mlp_bias": config.get("mlp_bias"),
        name: None if config.get(name) in (None, known) else config[name],
        "partial_rotary_factor": None if float(rotary) == 1.0 else rotary,
        "final_logit_softcapping": config.get("final_logit_softcapping"),
        "attn_logit_softcapping": config.get("attn_logit_softcapping"),
        "use_bidirectional_attention": config.get("use_bidirectional_attention"),
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


def _hf_rope(config: Mapping[str, Any], default_theta: float) -> tuple[float, RopeScaling]:
    # transformers 5 writes rope_parameters with the base inside, for each kind of layers if there are several; older
    # files have rope_theta and rope_scaling.
    values: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    values = values.get(_FULL) or values
    theta = float(values.get("rope_theta") or config.get("rope_theta") or default_theta)
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
