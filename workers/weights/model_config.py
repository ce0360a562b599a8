"""Description of a model in numbers, shared by weights, cache, rotary tables and scheduler.

Read from config.json by `hf_config` and from GGUF metadata by `gguf_config`. Independent of tensors, torch and files.
"""

from __future__ import annotations

from dataclasses import dataclass

from tanghulu.errors import ModelUnsupported


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Stretching of rotary frequencies for contexts beyond the trained one.

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

    ``intermediate`` is the width of one. ``normalised``: the weights of the picked ones add up to 1. ``dense_layers``
    have one ordinary MLP instead.
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
    """``layers`` in which a token sees only the last ``num_tokens`` positions, including its own.

    Their rotary frequencies have a base of their own and are not stretched.
    """

    num_tokens: int
    layers: frozenset[int]
    rope_theta: float

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ModelUnsupported(f"the sliding window is {self.num_tokens} tokens; it must be at least 1")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family. Counts are whole-model, before any parallel split.

    Specific to Gemma: embeddings are multiplied by ``embedding_scale``, norms by their weight plus ``norm_offset``,
    queries by ``query_scale`` beyond one over the root of ``head_dim``; ``sandwich_norms`` also norm the results of
    attention and MLP before they are added. ``activation`` is ``silu`` or ``gelu_tanh``.
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
            raise ModelUnsupported(f"{self.num_heads} attention heads are no multiple of {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelUnsupported(f"head_dim {self.head_dim} is odd; rotary embeddings need pairs")

    def experts_of(self, layer: int) -> RoutedExperts | None:
        """Return the experts of ``layer``; None if it has one ordinary MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    @property
    def mlp_widths(self) -> frozenset[int]:
        """Intermediate widths of the existing MLPs."""
        found = (self.experts_of(layer) for layer in range(self.num_layers))
        return frozenset(self.intermediate if experts is None else experts.intermediate for experts in found)

    @property
    def mlp_elements(self) -> int:
        """Elements of the weights of all layers' MLPs and routers."""
        return self._mlp_elements(active=False)

    @property
    def active_mlp_elements(self) -> int:
        """The part of `mlp_elements` by which a token is multiplied."""
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
        """Elements of an MLP's results for one token, in the layer with the most."""
        widest = 3 * self.intermediate
        if self.experts is None:
            return widest
        return max(widest, self.experts.per_token * (3 * self.experts.intermediate + 3 * self.hidden))
