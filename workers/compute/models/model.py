"""The one decoder of all models: RMSNorm, rotary positions, grouped-query attention, gated MLPs, as in Llama.

Its relatives differ by switches of ModelConfig: biases on q, k, v (Qwen2), norms on each head's query and key (Qwen3),
a bias on the output projection, routed experts in place of an MLP (Mixtral, Qwen3-MoE), and the features of Gemma 3:
layers with a sliding window and a rotary base of their own, norms after attention and MLP, a scale of the embedding. Q,
K and V are one matrix product, and so are gate and up.

To add an architecture, enter it in ``hf_config.FAMILIES`` with its distinguishing features, and add switches here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from tanghulu.errors import ConfigError, ModelUnsupported
from tanghulu.workers.compute.attention.base import AttentionBackend, PagedPlan, SdpaAttention
from tanghulu.workers.compute.attention.invariant import InvariantAttention
from tanghulu.workers.compute.device import CPU, multiplies_bfloat16
from tanghulu.workers.compute.forward_batch import ForwardBatch
from tanghulu.workers.compute.kv_cache import KvTensors
from tanghulu.workers.compute.linear import Arithmetic, Linear
from tanghulu.workers.compute.models.layers import Norm, RotaryTable, rotate_
from tanghulu.workers.compute.models.mlp import Mlp, load_mlp
from tanghulu.workers.compute.models.shard import WHOLE, Shard, require_split
from tanghulu.workers.compute.models.weight_loader import WeightLoader
from tanghulu.workers.compute.process_tuning import keep_large_blocks
from tanghulu.workers.compute.prompt_scoring import score
from tanghulu.workers.weights.model_config import ModelConfig, RopeScaling
from tanghulu.workers.weights.safetensors_dir import WeightSource
from tanghulu.workers.weights.source import ModelSource

Progress = Callable[[float], None]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights; ``qkv`` is fused by rows. The norms ``after_`` are Gemma's, of the summands."""

    window: int | None
    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    after_attention: Norm | None
    mlp_norm: Norm
    mlp: Mlp
    after_mlp: Norm | None


class Model:
    """Weights of a Llama-like model and its forward pass; holds no request's state.

    ``batch_invariant``: a token's results depend bit by bit only on earlier tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        attention: AttentionBackend,
        dtype: torch.dtype,
        progress: Progress | None = None,
        shard: Shard = WHOLE,
        device: torch.device = CPU,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """Load the weights of ``shard`` as ``dtype`` onto ``device``; ``progress`` receives the fraction done, 0..1.

        ``attention`` takes queries of the types of ``arithmetic``. Raises ModelUnsupported that names a missing tensor,
        one whose shape contradicts ``config``, or an unused one; ConfigError if the model's heads cannot be divided
        that way.
        """
        require_split(config, shard.size)
        self._shard = shard
        self._num_heads, self._num_kv_heads = config.num_heads // shard.size, config.num_kv_heads // shard.size
        self.config = config
        self.dtype = dtype
        self.device = device
        self._arithmetic = arithmetic or Arithmetic.of(dtype, device)
        self.batch_invariant = self._arithmetic.invariant
        self._attention = attention
        loader = WeightLoader(config, weights, dtype, shard, device, self._arithmetic)
        self._embedding = loader.take("model.embed_tokens.weight", (config.vocab, config.hidden))
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_load_layer(loader, config, index))
            if progress is not None:
                progress((index + 1) / (config.num_layers + 1))
        head = _load_head(loader, config, self._embedding)
        self._head = Linear(_own_rows(head, shard), arithmetic=self._arithmetic)
        self._norm = loader.norm("model.norm.weight", config.hidden, self._head.take_factor())
        self._rotary: dict[int | None, RotaryTable] = {None: RotaryTable(config, loader.frequency_factors(), device)}
        if (sliding := config.sliding) is not None:
            own = replace(config, rope_theta=sliding.rope_theta, rope_scaling=RopeScaling())
            self._rotary[sliding.num_tokens] = RotaryTable(own, None, device)
        loader.require_all_taken()
        # Rounded like the weights: Gemma was trained that way.
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        if progress is not None:
            progress(1.0)

    @property
    def is_static(self) -> bool:
        """Whether operations depend on a step's shape alone, so that they can be recorded."""
        return not self.batch_invariant and all(layer.mlp.is_static for layer in self._layers)

    def with_layers(self, num_layers: int) -> Model:
        """Return the model without the layers after the first ``num_layers``; the weights are shared."""
        shallow = copy.copy(self)
        shallow._layers = self._layers[:num_layers]
        shallow.config = replace(self.config, num_layers=num_layers)
        return shallow

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        """Compute ``batch``, writing its KV to ``cache``; return requested logits, float32 [L, vocab], on rank 0."""
        # No tensor here is of a class that replaces torch's functions; looking for one costs 10 us per product.
        with torch._C.DisableTorchFunctionSubclass():
            return self._forward(batch, cache)

    def _forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        dtype = self._arithmetic.of_rows(batch.num_tokens)
        views = {
            window: _View(self._attention.plan(cache, batch, self._num_heads, dtype, window), *rotary)
            for window, table in self._rotary.items()
            for rotary in [table.rows(batch.positions, dtype)]
        }
        hidden = F.embedding(batch.token_ids, self._embedding).to(dtype)
        if self._embedding_scale != 1:
            hidden.mul_(self._embedding_scale)
        for index, layer in enumerate(self._layers):
            plan, cos, sin = views[layer.window]
            attended = plan.attend(index, *self._project(layer, hidden, cos, sin))
            self._add(layer.out, attended, hidden, layer.after_attention)
            self._add(layer.mlp, layer.mlp_norm(hidden), hidden, layer.after_mlp)
        if batch.scored:
            score(batch.scored, lambda rows: self._logits(hidden, rows), self.config.vocab, self.device)
        return self._logits(hidden, batch.logit_rows)

    def _logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of ``rows``, float32 [n, vocab], on rank 0; every rank must request the same rows."""
        wanted = hidden.index_select(0, rows)
        wanted = self._norm(wanted.to(self._arithmetic.of_rows(len(wanted))))
        return self._shard.gather_columns(self._head(wanted).float())[:, : self.config.vocab]

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [N, heads, head_dim], and for each token the heads of K and then those of V, rotated."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        fused = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, self.config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = fused.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
            fused = torch.cat((layer.query_norm(query), layer.key_norm(key), value), dim=1)
        rotate_(fused.narrow(1, 0, num_heads + num_kv_heads), cos, sin)
        query, key_value = fused.split_with_sizes((num_heads, 2 * num_kv_heads), 1)
        return query, key_value

    def _add(self, product: Linear | Mlp, inputs: torch.Tensor, hidden: torch.Tensor, norm: Norm | None) -> None:
        """Add ``product`` of ``inputs``, summed over the ranks and normed, to ``hidden`` in place."""
        if self._shard.size == 1 and norm is None:
            product.add_to(hidden, inputs)
            return
        total = self._shard.total(product(inputs))
        hidden.add_(total if norm is None else norm(total))


class _View(NamedTuple):
    """A step as some layers see it: the plan of their attention, and the rotation of its positions."""

    plan: PagedPlan
    cos: torch.Tensor
    sin: torch.Tensor


def _load_head(loader: WeightLoader, config: ModelConfig, embedding: torch.Tensor) -> torch.Tensor:
    """Load the head [vocab, hidden]: if tied, the embedding itself, which a second copy in the file must equal."""
    if config.tie_embeddings and not loader.has("lm_head.weight"):
        return embedding
    head = loader.take("lm_head.weight", (config.vocab, config.hidden))
    if not config.tie_embeddings:
        return head
    if not torch.equal(head, embedding):
        raise ModelUnsupported(
            "tensor 'lm_head.weight' differs from the embedding, but the config ties them; "
            "set tie_word_embeddings to false if the model has a head of its own"
        )
    return embedding


def _own_rows(head: torch.Tensor, shard: Shard) -> torch.Tensor:
    """Return the rank's rows of the output head, padded with zeros to the same number on all ranks."""
    if shard.size == 1:  # shared with the embedding if a GPU multiplies it as it is
        return head
    each = -(-len(head) // shard.size)
    rows = head[shard.rank * each : (shard.rank + 1) * each]
    return F.pad(rows, (0, 0, 0, each - len(rows)))


def _load_layer(loader: WeightLoader, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    attention = f"{prefix}.self_attn"
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
    project = loader.linear(attention, qkv, config.hidden, bias=config.attention_bias)
    mlp, sandwich = load_mlp(loader, config, index), config.sandwich_norms
    before, after = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm", {}
    if sandwich:
        names = ("post_attention_layernorm", "post_feedforward_layernorm")
        after = {name: loader.norm(f"{prefix}.{name}.weight", config.hidden) for name in names}
    query_norm = key_norm = None
    if config.qk_norm:
        query_norm = loader.norm(f"{attention}.q_norm.weight", config.head_dim, config.query_scale)
        key_norm = loader.norm(f"{attention}.k_norm.weight", config.head_dim)
    sliding = config.sliding
    return _Layer(
        window=sliding.num_tokens if sliding is not None and index in sliding.layers else None,
        input_norm=loader.norm(f"{prefix}.input_layernorm.weight", config.hidden, project.take_factor()),
        qkv=project,
        query_norm=query_norm,
        key_norm=key_norm,
        out=loader.summand(f"{attention}.o_proj", config.hidden, width, bias=config.output_bias),
        after_attention=after.get("post_attention_layernorm"),
        mlp_norm=loader.norm(f"{prefix}.{before}.weight", config.hidden, mlp.take_factor()),
        mlp=mlp,
        after_mlp=after.get("post_feedforward_layernorm"),
    )


def load_model(
    source: ModelSource,
    dtype: torch.dtype,
    progress: Progress | None = None,
    shard: Shard = WHOLE,
    device: torch.device = CPU,
    attention: AttentionBackend | None = None,
    *,
    arithmetic: Arithmetic | None = None,
) -> Model:
    """Load ``shard`` of the weights of ``source`` onto ``device``; ``progress`` receives the fraction done, 0..1.

    Without ``attention`` it uses SDPA, which works everywhere, invariantly if ``arithmetic`` is; without ``arithmetic``
    it is computed as suits ``device``. Raises ModelUnsupported that names the unusable tensor.
    """
    keep_large_blocks()
    invariant = arithmetic is not None and arithmetic.invariant
    attention = attention or (InvariantAttention() if invariant else SdpaAttention())
    weights = source.open_weights()
    try:
        return Model(source.config, weights, attention, dtype, progress, shard, device, arithmetic=arithmetic)
    finally:
        weights.close()


def pick_dtype(name: str, device: torch.device = CPU) -> torch.dtype:
    """Return the dtype ``name``; ``auto`` is bfloat16, but float16 on GPUs that emulate bfloat16.

    On CPUs bfloat16 is the fastest, however they multiply it (`linear`), and its KV has half the bytes of float32's;
    one choice for all of them lets workers on different CPUs share their KV. Raises ConfigError.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cpu" or multiplies_bfloat16(device) else torch.float16
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} is unknown; choose auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def kv_dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the name of the KV's type for ``--kv-dtype`` ``name`` and a model of ``dtype``."""
    return dtype_name(dtype) if name == "auto" else name


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for torch.float32: the name used by flags, fingerprints and the wire."""
    return str(dtype).removeprefix("torch.")
