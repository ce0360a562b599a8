"""Choice of a worker's attention backend: each states whether it supports a device, a type and a head, or why not.

To add one: derive a class from `AttentionBackend`, and enter it in ``_BACKENDS`` before those that it outperforms.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import structlog
import torch

from tanghulu.errors import ConfigError
from tanghulu.workers.compute.attention import varlen as attention_varlen
from tanghulu.workers.compute.attention.base import AttentionBackend, SdpaAttention
from tanghulu.workers.compute.attention.varlen import VarlenAttention, pick_kernel

_log = structlog.get_logger(__name__)


class AttentionNeeds(NamedTuple):
    """Requirements for a backend: device, computing type, width of a head, length of a block, windows.

    ``kept_as`` is the type of the cache, None for the computing type.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    block_tokens: int
    has_windows: bool = False
    kept_as: torch.dtype | None = None


class _Kind(NamedTuple):
    why_not: Callable[[AttentionNeeds], str | None]
    make: Callable[[AttentionNeeds], AttentionBackend]


def _why_not_varlen(needs: AttentionNeeds) -> str | None:
    if needs.has_windows:
        return "FlashAttention is not used for models with sliding windows"
    return attention_varlen.why_not(*needs[:3])


def _make_varlen(needs: AttentionNeeds) -> AttentionBackend:
    kernel, reason = pick_kernel(*needs[:4], kept_as=needs.kept_as)
    if reason:
        _log.info("attention.gathers", block_tokens=needs.block_tokens, reason=reason)
    return VarlenAttention(kernel)


def _why_not_triton(needs: AttentionNeeds) -> str | None:
    if needs.device.type != "cuda":
        return f"Triton's kernel runs on GPUs, not on {needs.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed; torch's builds for GPUs bring it along"
    from tanghulu.workers.compute.attention.triton_decode import why_not

    return why_not(*needs[:4], has_windows=needs.has_windows, kept_as=needs.kept_as)


def _make_triton(needs: AttentionNeeds) -> AttentionBackend:
    """Return the backend with the best other one for prompts."""
    from tanghulu.workers.compute.attention.triton_decode import TritonAttention

    prompts = "sdpa" if can("varlen", needs) else "varlen"
    processors = torch.cuda.get_device_properties(needs.device).multi_processor_count
    return TritonAttention(_BACKENDS[prompts].make(needs), processors)


_BACKENDS = {
    "triton": _Kind(_why_not_triton, _make_triton),
    "varlen": _Kind(_why_not_varlen, _make_varlen),
    "sdpa": _Kind(lambda needs: None, lambda needs: SdpaAttention()),
}
#: Values of ``--attention``.
ATTENTION_NAMES = ("auto", *_BACKENDS)


def can(name: str, needs: AttentionNeeds) -> str | None:
    """Return why the backend ``name`` cannot serve ``needs``; None if it can."""
    return _BACKENDS[name].why_not(needs)


def pick_attention(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """Make the backend ``name``, or with ``auto`` the best for ``needs``; raises ConfigError with the reason."""
    if name not in ATTENTION_NAMES:
        raise ConfigError(f"--attention {name!r} is unknown; choose {', '.join(ATTENTION_NAMES)}")
    reasons: dict[str, str] = {}
    for candidate in _BACKENDS if name == "auto" else (name,):
        reason = can(candidate, needs)
        if reason is None:
            _log.info("attention.picked", backend=candidate, device=str(needs.device), **reasons)
            return _BACKENDS[candidate].make(needs)
        reasons[candidate] = reason
    raise ConfigError(f"--attention {name}: {'; '.join(reasons.values())}")
