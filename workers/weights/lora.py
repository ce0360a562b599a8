"""A LoRA adapter merged into the weights that it was trained for: W + scale * B @ A, in float32, tensor by tensor.

A worker with an adapter is a worker of a model of its own, called ``base:name``, at the base's speed. Its fingerprint
is its own too, so that none of its KV is taken for the base's. Method: https://arxiv.org/abs/2106.09685; format: PEFT's
``adapter_config.json`` and ``adapter_model.safetensors``. What would change the results and is not computed (DoRA,
biases, whole modules beside the adapter, embeddings) is refused by its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tanghulu.errors import ConfigError, ModelUnsupported

if TYPE_CHECKING:
    import torch

    from tanghulu.workers.weights.weight_source import WeightSource

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OPTION = re.compile(r"([A-Za-z0-9][\w.-]{0,63})=(.+)")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: What an adapter may have beside A and B, and the values that mean that it has not.
_REFUSED: dict[str, tuple[object, ...]] = {
    "bias": (None, "none"),
    "use_dora": (None, False),
    "modules_to_save": (None, []),
    "alpha_pattern": (None, {}),
    "rank_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
}


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter that was found: its name, its folder, and the factor of B @ A."""

    name: str
    folder: Path
    scale: float

    @classmethod
    def of(cls, option: str) -> LoraAdapter | None:
        """The adapter that ``--lora name=DIR`` names; None for an empty text.

        Raises ConfigError for another form, ModelUnsupported for an adapter that cannot be used.
        """
        if not option:
            return None
        named = _OPTION.fullmatch(option)
        if named is None:
            raise ConfigError(f"--lora is {option!r}; it must be name=DIR, the name of letters, digits, '.', '_', '-'")
        folder = Path(named[2]).expanduser()
        try:
            config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelUnsupported(f"cannot read the adapter {folder / _CONFIG}: {error}") from error
        return cls(named[1], folder, _scale(config))

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that the merged weights follow from, beside the base's."""
        return (self.folder / _CONFIG, self.folder / _WEIGHTS)

    def merged(self, base: WeightSource) -> WeightSource:
        """The weights of ``base``, which this closes, with the adapter in them.

        Raises ModelUnsupported that names a tensor of the adapter that has no place in ``base``.
        """
        from tanghulu.workers.weights.safetensors_dir import SafetensorsDir  # it imports torch, which names need not

        opened = SafetensorsDir([self.folder / _WEIGHTS])
        try:
            return _MergedWeights(base, _pairs(opened, base), self.scale)
        finally:
            opened.close()


def _scale(config: Mapping[str, Any]) -> float:
    if config.get("peft_type") != "LORA":
        raise ModelUnsupported(f"the adapter is {config.get('peft_type')!r}; this worker runs LORA")
    for name, harmless in _REFUSED.items():
        if config.get(name) not in harmless:
            raise ModelUnsupported(f"the adapter has {name} {config[name]!r}, which this worker does not compute")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise ModelUnsupported(f"the adapter has rank {rank!r} and lora_alpha {alpha!r}")
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _pairs(opened: Any, base: WeightSource) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The tensors A and B of each weight of ``base`` that the adapter changes."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in opened.tensor_names():
        match = _TENSOR.fullmatch(name)
        if match is None or not base.has(f"{match[1]}.weight"):
            raise ModelUnsupported(f"the adapter's tensor {name!r} has no place in the base model")
        found.setdefault(f"{match[1]}.weight", {})[match[2]] = opened.tensor(name).float()
    incomplete = [name for name, pair in found.items() if len(pair) != 2]
    if incomplete or not found:
        raise ModelUnsupported(f"the adapter lacks A or B of {', '.join(incomplete) or 'every weight'}")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}


class _MergedWeights:
    """A `WeightSource`: ``base`` with ``pairs`` of A and B added."""

    def __init__(
        self, base: WeightSource, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float
    ) -> None:
        self._base, self._pairs, self._scale = base, pairs, scale

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def tensor(self, name: str) -> torch.Tensor:
        weight = self._base.tensor(name)
        if name not in self._pairs:
            return weight
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise ModelUnsupported(
                f"tensor {name!r} is {weight.dtype}: an adapter is not merged into quantised weights"
            )
        down, up = self._pairs[name]
        if (len(up), down.shape[1]) != tuple(weight.shape) or up.shape[1] != len(down):
            raise ModelUnsupported(
                f"the adapter's A {tuple(down.shape)} and B {tuple(up.shape)} do not fit {name!r} {tuple(weight.shape)}"
            )
        return weight.float().addmm(up, down, alpha=self._scale)

    def close(self) -> None:
        self._base.close()
