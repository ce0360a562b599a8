"""MLPs of a layer: one for every token, or experts of which a router picks a few for each.

Experts (mixture of experts, https://arxiv.org/abs/1701.06538, as in Mixtral and Qwen3-MoE): the router's softmax gives
each token a weight for each expert; the best few compute it, and their results are added up by these weights. The rows
of a step are put in the order of their experts, so that an expert multiplies all its rows at once and each weight is
read once a step. Worked example, 2 of 4 experts, 3 tokens that picked {1, 0}, {1, 3}, {0, 1}: in order of experts the
rows are 0 2 | 0 1 2 | 1, three products; put back in order, each token adds up the results of its picks, best first.

On GPUs that have a kernel for it one grouped product takes the place of all experts' (`GroupedExperts`): hundreds of
launches a layer become two, and the numbers of rows stay on the device, so that steps can be recorded.

A token's summands and their order follow from the token alone, so experts are batch-invariant if their products are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from tanghulu.workers.compute.linear import Linear
from tanghulu.workers.compute.models.layers import Activation, activation
from tanghulu.workers.compute.models.weight_loader import WeightLoader
from tanghulu.workers.weights.model_config import ModelConfig, RoutedExperts


class GatedMlp:
    """down(activate(gate(x)) * up(x)) of normed hidden states; ``gate_up`` is fused by rows.

    On several ranks each computes a summand. Results [N, hidden] are tensors of their own.
    """

    is_static = True

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


class SeparateExperts:
    """Experts with a product each."""

    def __init__(self, experts: Sequence[GatedMlp]) -> None:
        self._experts = experts

    def __call__(self, rows: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Compute ``rows`` [R, hidden] by the experts ``owners`` [R], which ascend."""
        counts = torch.bincount(owners, minlength=len(self._experts)).tolist()
        return torch.cat([self._experts[at](part) for at, part in enumerate(torch.split(rows, counts)) if len(part)])


class GroupedExperts:
    """As `SeparateExperts`, in two products: ``gate_up`` [count, 2 width, hidden], ``down`` [count, hidden, width]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activate: Activation) -> None:
        self._gate_up, self._down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self._numbers = torch.arange(len(down), device=down.device)
        self._activate = activate

    def __call__(self, rows: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        ends = torch.searchsorted(owners, self._numbers, right=True, out_int32=True)
        gate, up = torch._grouped_mm(rows, self._gate_up, offs=ends).chunk(2, dim=-1)
        return torch._grouped_mm(self._activate(gate).mul_(up), self._down, offs=ends)


#: Compute capability from which torch has a kernel for grouped products; others loop over experts on the host.
_GROUPED_FROM = (9, 0)


def can_group(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Return whether ``device`` has a kernel for grouped products of ``dtype`` with rows of ``widths``."""
    return (
        device.type == "cuda"
        and dtype is torch.bfloat16
        and hasattr(torch, "_grouped_mm")
        and not any(width % 8 for width in widths)  # rows begin at multiples of 16 bytes
        and torch.cuda.get_device_capability(device) >= _GROUPED_FROM
    )


class RoutedMlp:
    """As a `GatedMlp`: ``experts``, of which ``router`` [count, hidden] picks some for each token by ``routing``."""

    def __init__(self, router: Linear, experts: SeparateExperts | GroupedExperts, routing: RoutedExperts) -> None:
        self._router, self._experts, self._routing = router, experts, routing

    @property
    def is_static(self) -> bool:
        """Whether operations depend on the number of rows alone, and not on the experts that tokens pick."""
        return isinstance(self._experts, GroupedExperts)

    def take_factor(self) -> float:
        return 1.0  # router and experts take the same inputs, and each has a factor of its own

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        per_token = self._routing.per_token
        weights, picked = self._pick(inputs)
        owners, order = picked.flatten().sort(stable=True)
        results = self._experts(inputs.index_select(0, order // per_token), owners)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=order.device))
        weighted = results.index_select(0, back).view(len(inputs), per_token, -1).mul_(weights[:, :, None])
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
    folder = f"{prefix}.{'block_sparse_moe' if loader.has(f'{prefix}.block_sparse_moe.gate.weight') else 'mlp'}"
    arithmetic = loader.arithmetic
    router = Linear(loader.take(f"{folder}.gate.weight", (experts.count, hidden)), arithmetic=arithmetic)
    weights = _expert_weights(loader, hidden, experts, folder)
    width = experts.intermediate // loader.shard.size
    if not arithmetic.invariant and can_group(loader.device, arithmetic.many, (hidden, width)):
        gate_up, down = (torch.stack(each) for each in zip(*weights, strict=True))
        return RoutedMlp(router, GroupedExperts(gate_up, down, activate), experts)
    made = [
        GatedMlp(Linear(gate_up, arithmetic=arithmetic), Linear(down, arithmetic=arithmetic), activate)
        for gate_up, down in weights
    ]
    return RoutedMlp(router, SeparateExperts(made), experts)


def _expert_weights(
    loader: WeightLoader, hidden: int, experts: RoutedExperts, folder: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's rows of each expert's gate and up, one behind the other, and its columns of down."""
    width, own = experts.intermediate, loader.shard.own(experts.intermediate)
    if loader.has(f"{folder}.experts.gate_up_proj"):
        widening = loader.take(f"{folder}.experts.gate_up_proj", (experts.count, 2 * width, hidden))
        narrowing = loader.take(f"{folder}.experts.down_proj", (experts.count, hidden, width))
        for gate_up, down in zip(widening, narrowing, strict=True):
            gate, up = gate_up.chunk(2)
            yield torch.cat((gate[own], up[own])), down[:, own]
        return
    names = ("w1", "w3", "w2") if folder.endswith("block_sparse_moe") else ("gate_proj", "up_proj", "down_proj")
    for number in range(experts.count):
        gate, up, down = (f"{folder}.experts.{number}.{name}.weight" for name in names)
        yield (
            torch.cat([loader.take(name, (width, hidden))[own] for name in (gate, up)]),
            loader.take(down, (hidden, width))[:, own],
        )
