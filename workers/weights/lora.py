"""A LoRA adapter merged into its base weights: W + scale * B @ A, in float32, tensor by tensor.

A worker with an adapter serves a model of its own, called ``base:name``, at the base's speed. Its fingerprint is its
own too, so that its KV is never taken for the base's. Method: https://arxiv.org/abs/2106.09685; format: PEFT's
``adapter_config.json`` and ``adapter_model.safetensors``. A key of ``adapter_config.json`` that is neither read here
nor known to be without effect is refused by its name, and so is a tensor without a place in the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tanghulu.errors import ConfigError, ModelUnsupported
from tanghulu.model_files.fields import Fields, names_in, read_json

if TYPE_CHECKING:
    import torch

    from tanghulu.workers.weights.safetensors_dir import WeightSource

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_OPTION = re.compile(r"([A-Za-z0-9][\w.-]{0,63})=(.+)")
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
#: Ways to initialise an adapter before training that leave the base's weights unchanged; the others (PiSSA, OLoRA,
#: CorDA, LoftQ, LoRA-GA) take the first factors out of them, which PEFT repeats when it loads the adapter.
_BASE_UNCHANGED: Final = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
#: Keys of PEFT's LoraConfig without effect on a loaded adapter's results.
_HARMLESS: Final = names_in(
    """
    auto_mapping base_model_name_or_path eva_config inference_mode lora_dropout megatron_core peft_version
    qalora_group_size revision runtime_config task_type
    """
)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter found on disk: its name, its folder, the factor of B @ A, and its target modules.

    ``targets`` are suffixes of names, or one pattern of whole names, as in PEFT; None for all.
    """

    name: str
    folder: Path
    rank: int
    scale: float
    targets: tuple[str, ...] | re.Pattern[str] | None

    @classmethod
    def of(cls, option: str) -> LoraAdapter | None:
        """Return the adapter named by ``--lora name=DIR``; None for an empty text.

        Raises ConfigError for another form, ModelUnsupported for an adapter that cannot be used.
        """
        if not option:
            return None
        named = _OPTION.fullmatch(option)
        if named is None:
            raise ConfigError(f"--lora is {option!r}; use name=DIR, with a name of letters, digits, '.', '_' and '-'")
        folder = Path(named[2]).expanduser()
        config = Fields(read_json(folder / _CONFIG), f"the adapter's {_CONFIG}")
        rank, scale = _rank_and_scale(config)
        targets = _targets(config)
        config.refuse_others(_HARMLESS)
        return cls(named[1], folder, rank, scale, targets)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that determine the merged weights, beside the base's."""
        return (self.folder / _CONFIG, self.folder / _WEIGHTS)

    def merged(self, base: WeightSource) -> WeightSource:
        """Return the weights of ``base``, which this closes, with the adapter merged in.

        Raises ModelUnsupported that names a tensor of the adapter without a place in ``base``.
        """
        from tanghulu.workers.weights.safetensors_dir import SafetensorsDir  # it imports torch, which names need not

        opened = SafetensorsDir([self.folder / _WEIGHTS])
        try:
            return _MergedWeights(base, self._pairs(opened, base), self.scale)
        finally:
            opened.close()

    def _pairs(self, opened: Any, base: WeightSource) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return the tensors A [rank, columns] and B [rows, rank] of each weight of ``base`` changed by the adapter."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name in opened.tensor_names():
            match = _TENSOR.fullmatch(name)
            if match is None or not base.has(f"{match[1]}.weight") or not self._changes(match[1]):
                raise ModelUnsupported(f"the adapter's tensor {name!r} has no place in the base model")
            tensor = opened.tensor(name).float()
            if tensor.ndim != 2 or tensor.shape[0 if match[2] == "A" else 1] != self.rank:
                shape = tuple(tensor.shape)
                raise ModelUnsupported(f"the adapter's tensor {name!r} has shape {shape}; the rank is {self.rank}")
            found.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
        incomplete = [name for name, pair in found.items() if len(pair) != 2]
        if incomplete or not found:
            raise ModelUnsupported(f"the adapter lacks A or B of {', '.join(incomplete) or 'every weight'}")
        return {name: (pair["A"], pair["B"]) for name, pair in found.items()}

    def _changes(self, module: str) -> bool:
        """Return whether PEFT would give ``module`` factors."""
        if isinstance(self.targets, tuple):
            return any(module == target or module.endswith(f".{target}") for target in self.targets)
        return self.targets is None or self.targets.fullmatch(module) is not None


def _rank_and_scale(config: Fields) -> tuple[int, float]:
    if (kind := config.text("peft_type")) != "LORA":
        raise ModelUnsupported(f"the adapter's peft_type is {kind!r}; this worker supports LORA")
    config.only("bias", None, "none")
    config.only("init_lora_weights", *_BASE_UNCHANGED)
    rank, alpha = config.integer("r"), config.number("lora_alpha")
    return rank, alpha / (rank**0.5 if config.flag("use_rslora") else rank)


def _targets(config: Fields) -> tuple[str, ...] | re.Pattern[str] | None:
    """Return the modules to which PEFT would give factors: it ignores those of others in the file."""
    if "target_modules" not in config:
        config.only("target_modules", None)
        return None
    if not config.is_text("target_modules"):
        return tuple(config.items("target_modules", str))
    pattern = config.text("target_modules")
    try:
        return re.compile(r"(?!lm_head$).*" if pattern == "all-linear" else pattern)
    except re.error as error:
        raise config.unusable("target_modules", f"it must be a list of names or a pattern: {error}") from error


class _MergedWeights:
    """A `WeightSource`: ``base`` with ``pairs`` of A and B added."""

    def __init__(
        self, base: WeightSource, pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scale: float
    ) -> None:
        self._base, self._pairs, self._scale = base, pairs, scale

        self._taken: set[str] = set()

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def untaken(self) -> Iterable[str]:
        return {*self._base.untaken(), *(f"{name} (of the adapter)" for name in self._pairs.keys() - self._taken)}

    def tensor(self, name: str) -> torch.Tensor:
        weight = self._base.tensor(name)
        if name not in self._pairs:
            return weight
        if not weight.is_floating_point() or weight.itemsize < 2:
            raise ModelUnsupported(
                f"tensor {name!r} is {weight.dtype}: adapters cannot be merged into quantised weights"
            )
        self._taken.add(name)
        down, up = self._pairs[name]
        if (len(up), down.shape[1]) != tuple(weight.shape) or up.shape[1] != len(down):
            raise ModelUnsupported(
                f"the adapter's A {tuple(down.shape)} and B {tuple(up.shape)} do not fit {name!r} {tuple(weight.shape)}"
            )
        return weight.float().addmm(up, down, alpha=self._scale)

    def close(self) -> None:
        self._base.close()
