"""The Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Its relatives differ by three switches of ModelConfig: biases on q, k, v (Qwen2), norms on each head's query
and key (Qwen3), a bias on the output projection. Q, K and V are one matrix product, and so are gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.compute.attention.base import AttentionBackend
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.forward_batch import ForwardBatch
from tanghulu.workers.compute.kv_cache import KvTensors
from tanghulu.workers.compute.linear import Arithmetic, Linear
from tanghulu.workers.compute.models.rope import RotaryTable, rotate_
from tanghulu.workers.compute.models.shard import WHOLE, Shard, require_split
from tanghulu.workers.weights.model_config import ModelConfig
from tanghulu.workers.weights.source import WeightSource

Progress = Callable[[float], None]

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Norm:
    """RMSNorm: x / sqrt(mean(x^2) + eps) * ``weight``, which has the type and the device of the inputs.

    On CPUs, with n columns, as sqrt(n) x / hypot(|x|, sqrt(n eps)): four passes where torch's own takes seven, and
    the sqrt(n) is in the weight. They are float32's whatever the type, and the result is rounded once: with each pass
    rounded to bfloat16, SmolLM2's logits were off by up to 0.09 of the largest, and are by 0.02. On GPUs torch has one
    kernel for all of it.
    """

    def __init__(self, weight: torch.Tensor, eps: float, factor: float = 1.0) -> None:
        """``factor``: a power of two that all results are multiplied by."""
        columns, weight = len(weight), weight * factor
        self._eps = eps
        self._on_cpu = weight.device.type == "cpu"
        self._weight = weight.float() * math.sqrt(columns) if self._on_cpu else weight
        self._smallest = torch.tensor(math.sqrt(columns * eps))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden`` [..., columns] normed, a tensor of its own."""
        if not self._on_cpu:
            return F.rms_norm(hidden, (len(self._weight),), self._weight, self._eps)
        states = hidden.float()
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
        normed: torch.Tensor = states / size.hypot_(self._smallest)
        return normed.mul_(self._weight).to(hidden.dtype)


@dataclass(slots=True)
class _Layer:
    """One decoder layer's weights; ``qkv`` and ``gate_up`` are fused by rows."""

    input_norm: Norm
    qkv: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class LlamaModel:
    """Weights of a Llama-like model and its forward pass; holds no state of any request."""

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
        """Load the weights of ``shard`` as ``dtype`` onto ``device``; ``progress`` is told the fraction done, 0..1.

        ``attention`` takes queries of the types of ``arithmetic``. Raises ModelUnsupported that names a missing tensor,
        or one whose shape contradicts ``config``; ConfigError if the model's heads cannot be shared out so.
        """
        require_split(config, shard.size)
        self._shard = shard
        self._num_heads, self._num_kv_heads = config.num_heads // shard.size, config.num_kv_heads // shard.size
        self.config = config
        self.dtype = dtype
        self.device = device
        self._arithmetic = arithmetic or Arithmetic.of(dtype, device)
        self._attention = attention
        loader = _Loader(config, weights, dtype, shard, device, self._arithmetic)
        self._embedding = loader.take("model.embed_tokens.weight", (config.vocab, config.hidden))
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_load_layer(loader, config, index))
            if progress is not None:
                progress((index + 1) / (config.num_layers + 1))
        tied = config.tie_embeddings
        head = self._embedding if tied else loader.take("lm_head.weight", (config.vocab, config.hidden))
        self._head = Linear(_own_rows(head, shard), arithmetic=self._arithmetic)
        self._norm = loader.norm("model.norm.weight", config.hidden, self._head)
        factors = weights.tensor("rope_freqs.weight") if weights.has("rope_freqs.weight") else None
        self._rotary = RotaryTable(config, factors, device)
        if progress is not None:
            progress(1.0)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        """Compute ``batch``, writing its KV to ``cache``; returns the wanted logits, float32 [L, vocab] (on rank 0)."""
        # No tensor here is of a class that replaces torch's functions; to look for one costs 10 us a product.
        with torch._C.DisableTorchFunctionSubclass():
            return self._forward(batch, cache)

    def _forward(self, batch: ForwardBatch, cache: KvTensors) -> torch.Tensor:
        dtype = self._arithmetic.of_rows(batch.num_tokens)
        plan = self._attention.plan(cache, batch, self._num_heads, dtype)
        cos, sin = self._rotary.rows(batch.positions, dtype)
        hidden = F.embedding(batch.token_ids, self._embedding).to(dtype)
        for index, layer in enumerate(self._layers):
            attended = plan.attend(index, *self._project(layer, hidden, cos, sin))
            self._add(layer.out, attended, hidden)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            self._add(layer.down, F.silu(gate).mul_(up), hidden)
        wanted = hidden.index_select(0, batch.logit_rows)
        wanted = self._norm(wanted.to(self._arithmetic.of_rows(len(wanted))))
        return self._shard.gather_columns(self._head(wanted).float())[:, : self.config.vocab]

    def _project(
        self, layer: _Layer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [N, heads, head_dim], and of each token the heads of K and then those of V, rotated."""
        num_heads, num_kv_heads = self._num_heads, self._num_kv_heads
        fused = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, self.config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key, value = fused.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
            fused = torch.cat((layer.query_norm(query), layer.key_norm(key), value), dim=1)
        rotate_(fused.narrow(1, 0, num_heads + num_kv_heads), cos, sin)
        query, key_value = fused.split_with_sizes((num_heads, 2 * num_kv_heads), 1)
        return query, key_value

    def _add(self, product: Linear, inputs: torch.Tensor, hidden: torch.Tensor) -> None:
        """Add ``product`` of ``inputs``, summed over the ranks, to ``hidden`` in place."""
        if self._shard.size == 1:
            product.add_to(hidden, inputs)
        else:
            hidden.add_(self._shard.total(product(inputs)))


class _Loader:
    """Takes tensors by name, checked against the shape that the config promises."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        dtype: torch.dtype,
        shard: Shard,
        device: torch.device,
        arithmetic: Arithmetic,
    ) -> None:
        self._config, self._weights, self._dtype, self._shard = config, weights, dtype, shard
        self._device, self._arithmetic = device, arithmetic

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._weights.tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelUnsupported(f"tensor {name!r} has shape {tuple(tensor.shape)}; the config says {shape}")
        if tensor.dtype not in _WEIGHT_DTYPES:  # its scales stand elsewhere
            raise ModelUnsupported(f"tensor {name!r} is {tensor.dtype}: this worker runs no quantised safetensors")
        if self._device.type != "cpu":  # in the file's type over the bus, converted there
            return tensor.to(self._device).to(self._dtype)
        # clone: a tensor that is a view of a mapped file must not outlive the file.
        return tensor.to(self._dtype, copy=True)

    def norm(self, name: str, size: int, before: Linear | None = None) -> Norm:
        """The norm ``name``, whose results go to ``before`` alone if that is given."""
        weight = self.take(name, (size,))
        return Norm(weight, self._config.rms_eps, 1.0 if before is None else before.take_factor())

    def linear(self, prefix: str, parts: tuple[tuple[str, int], ...], columns: int, *, bias: bool = False) -> Linear:
        """The product with this rank's rows of all ``parts`` (name, rows) of ``prefix``, one under the other."""
        own = self._shard.own
        weight = [self.take(f"{prefix}.{name}.weight", (rows, columns))[own(rows)] for name, rows in parts]
        biases = [self.take(f"{prefix}.{name}.bias", (rows,))[own(rows)] for name, rows in parts] if bias else []
        return Linear(torch.cat(weight), torch.cat(biases) if biases else None, self._arithmetic)

    def summand(self, name: str, rows: int, columns: int, *, bias: bool = False) -> Linear:
        """The product with this rank's columns; the ranks' results add up to the whole, the bias counted once."""
        weight = self.take(f"{name}.weight", (rows, columns))[:, self._shard.own(columns)]
        own_bias = self.take(f"{name}.bias", (rows,)) if bias and self._shard.rank == 0 else None
        return Linear(weight, own_bias, self._arithmetic)


def _own_rows(head: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The rank's rows of the output head, zeros behind the last so that all ranks have equally many."""
    if shard.size == 1:  # shared with the embedding where a GPU multiplies it as it is
        return head
    each = -(-len(head) // shard.size)
    rows = head[shard.rank * each : (shard.rank + 1) * each]
    return F.pad(rows, (0, 0, 0, each - len(rows)))


def _load_layer(loader: _Loader, config: ModelConfig, index: int) -> _Layer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = (("q_proj", width), ("k_proj", kv_width), ("v_proj", kv_width))
    gate_up = (("gate_proj", config.intermediate), ("up_proj", config.intermediate))
    project = loader.linear(attention, qkv, config.hidden, bias=config.attention_bias)
    widen = loader.linear(mlp, gate_up, config.hidden)
    return _Layer(
        input_norm=loader.norm(f"{prefix}.input_layernorm.weight", config.hidden, project),
        qkv=project,
        query_norm=loader.norm(f"{attention}.q_norm.weight", config.head_dim) if config.qk_norm else None,
        key_norm=loader.norm(f"{attention}.k_norm.weight", config.head_dim) if config.qk_norm else None,
        out=loader.summand(f"{attention}.o_proj", config.hidden, width, bias=config.output_bias),
        mlp_norm=loader.norm(f"{prefix}.post_attention_layernorm.weight", config.hidden, widen),
        gate_up=widen,
        down=loader.summand(f"{mlp}.down_proj", config.hidden, config.intermediate),
    )
