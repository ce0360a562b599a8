"""The engine's settings in the guests."""

from __future__ import annotations

from tanghulu.transfer_engine.core.config import EngineConfig, TransportLimits

MIB = 1 << 20
#: Small windows: of a batch that is larger, something is still to be posted when a fault is injected.
LIMITS = {
    "shm": TransportLimits(16 * MIB, 32 * MIB, 256),
    "rdma": TransportLimits(MIB // 2, 4 * MIB, 64),
    "tcp": TransportLimits(MIB, 8 * MIB, 64),
}
#: Patient enough for an emulated processor, and quick to try a path again.
CONFIG = EngineConfig(
    limits=LIMITS, slice_deadline_s=2.5, retries_max=6, pause_s=0.2, pause_max_s=0.4, pause_after_errors=1
)
