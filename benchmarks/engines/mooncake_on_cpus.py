"""vLLM's connector of Mooncake's store, where there is no CUDA: what it waits for is done when it asks.

On CPUs a step's KV is there when the step returns, so that an event that stands for it has always happened.
"""

from __future__ import annotations

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import MooncakeStoreConnector


class Happened:
    """In place of ``torch.cuda.Event``."""

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class MooncakeOnCpus(MooncakeStoreConnector):
    """The connector, unchanged."""


if not torch.cuda.is_available():
    torch.cuda.Event = Happened
