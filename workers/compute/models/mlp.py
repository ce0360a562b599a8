"""MLPs of a layer: one for every token, or experts of which a router picks a few for each.

Experts (mixture of experts, https://arxiv.org/abs/1701.06538, as in Mixtral and Qwen3-MoE): the router's softmax gives
each token a weight for each expert; the best few compute it, and their results are added up by these weights. The rows
of a step are put in the order of their experts, so that an expert multiplies all its rows at once and each weight is
read once a step. Worked example, 2 of 4 experts, 3 tokens that picked {1, 0}, {1, 3}, {0, 1}: in order of experts the
rows are 0 2 | 0 1 2 | 1, three products; put back in order, each token adds up the results of its picks, best first.

A token's summands and their order follow from the token alone, so experts are batch-invariant if their products are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tanghulu.workers.compute.linear import Linear
from tanghulu.workers.compute.models.layers import Activation, activation
from tanghulu.workers.compute.models.weight_loader import WeightLoader
from tanghulu.workers.weights.model_config import ModelConfig, RoutedExperts


class GatedMlp:
    """down(activate(gate(x)) * up(x)) of normed hidden states; ``gate_up`` is fused by rows.

    On several ranks each computes a summand. Results [N, hidden] are tensors of their own.
    """

    def __init__(self, gate_up: Linear, down: Linear, activate: Activation) -> None:
        self._gate_up, self._down, self._activate = gate_up, down, activate

    def take_factor(self) -> float:
        """Return the factor by which the caller must multiply all inputs."""
        return self._gate_up.take_factor()

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._down(self._widened(inputs))

    def add_to(self, sums: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the result to ``sums`` [N, hidden], in place."""
        self._down.add_to(sums, self._widened(inputs))

    def _widened(self, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = self._gate_up(inputs).chunk(2, dim=-1)
        return self._activate(gate).mul_(up)


class RoutedMlp:
    """As a `GatedMlp`: ``experts``, of which ``router`` [count, hidden] picks some for each token by ``routing``."""

    def __init__(self, router: Linear, experts: Sequence[GatedMlp], routing: RoutedExperts) -> None:
        self._router, self._experts, self._routing = router, experts, routing

    def take_factor(self) -> float:
        return 1.0  # router and experts take the same inputs, and each has a factor of its own

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        per_token = self._routing.per_token
        weights, picked = self._pick(inputs)
        flat = picked.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(self._experts)).tolist()
        rows = inputs.index_select(0, order // per_token)
        results = [self._experts[at](part) for at, part in enumerate(torch.split(rows, counts)) if len(part)]
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        weighted = torch.cat(results).index_select(0, back).view(len(inputs), per_token, -1).mul_(weights[:, :, None])
        total = weighted[:, 0].clone()
        for other in weighted.unbind(1)[1:]:
            total.add_(other)
        return total

    def add_to(self, sums: torch.Tensor, inputs: torch.Tensor) -> None:
        sums.add_(self(inputs))

    def _pick(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the numbers of each token's experts, best first, each [N, per_token]."""
        shares = torch.softmax(self._router(inputs).float(), dim=-1)
        weights, picked = shares.topk(self._routing.per_token, dim=-1)
        if self._routing.normalised:
            total = weights[:, :1].clone()
            for column in weights.unbind(1)[1:]:  # the order of a sum may depend on the number of rows
                total.add_(column[:, None])
            weights = weights / total
        return weights.to(inputs.dtype), picked


Mlp = GatedMlp | RoutedMlp


def load_mlp(loader: WeightLoader, config: ModelConfig, index: int) -> Mlp:
    """Load this rank's share of the MLP of layer ``index``. Raises ModelUnsupported that names what is missing."""
    in_pieces = loader.arithmetic.invariant and loader.on_cpu
    activate = activation(config.activation, in_pieces=in_pieces)
    experts, prefix = config.experts_of(index), f"model.layers.{index}.mlp"
    if experts is None:
        parts = (("gate_proj", config.intermediate), ("up_proj", config.intermediate))
        gate_up = loader.linear(prefix, parts, config.hidden)
        return GatedMlp(gate_up, loader.summand(f"{prefix}.down_proj", config.hidden, config.intermediate), activate)
    return _load_experts(loader, config.hidden, experts, f"model.layers.{index}", activate)


def _load_experts(
    loader: WeightLoader, hidden: int, experts: RoutedExperts, prefix: str, activate: Activation
) -> RoutedMlp:
    """Load any of three layouts: all experts in one tensor, or each by itself under Mixtral's names or Qwen's."""
    width, numbers = experts.intermediate, range(experts.count)
    mixtral = loader.has(f"{prefix}.block_sparse_moe.gate.weight")
    folder = f"{prefix}.{'block_sparse_moe' if mixtral else 'mlp'}"
    router = Linear(loader.take(f"{folder}.gate.weight", (experts.count, hidden)), arithmetic=loader.arithmetic)
    if loader.has(f"{folder}.experts.gate_up_proj"):
        widening = loader.take(f"{folder}.experts.gate_up_proj", (experts.count, 2 * width, hidden))
        narrowing = loader.take(f"{folder}.experts.down_proj", (experts.count, hidden, width))
        own = loader.shard.own(width)
        made = []
        for gate_up, down in zip(widening, narrowing, strict=True):
            gate, up = gate_up.chunk(2)
            widen = Linear(torch.cat((gate[own], up[own])), arithmetic=loader.arithmetic)
            made.append(GatedMlp(widen, Linear(down[:, own], arithmetic=loader.arithmetic), activate))
        return RoutedMlp(router, made, experts)
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    each = [f"{folder}.experts.{number}" for number in numbers]
    made = [
        GatedMlp(
            loader.linear(name, ((gate, width), (up, width)), hidden),
            loader.summand(f"{name}.{down}", hidden, width),
            activate,
        )
        for name in each
    ]
    return RoutedMlp(router, made, experts)
