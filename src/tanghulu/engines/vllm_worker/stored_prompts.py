"""Hand-overs through the store: waits until the blocks of a prompt are there, so that another worker finds them."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from tanghulu.engines.common.names import block_keys
from tanghulu.errors import TanghuluError
from tanghulu.masters import Masters
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.settings import ENGINE_ANSWER_S, Settings
from tanghulu.types import BlockHash, Fingerprint

_log = structlog.get_logger(__name__)
#: Saves that take longer, or were left out because too many were under way, are not waited for: who decodes computes
#: what it does not find.
STORED_S = 2.0


class StoredPrompts:
    """The store as far as the hand-over of prompts needs it; ``num_ranks`` of vLLM save a part of each block each."""

    def __init__(self, master: Masters, fingerprint: Fingerprint, num_ranks: int) -> None:
        self._client = AsyncClient(Settings(master=master, master_answer_s=ENGINE_ANSWER_S))
        self._fingerprint, self._num_ranks = fingerprint, num_ranks

    async def wait(self, hashes: Sequence[BlockHash]) -> bool:
        """Wait at most STORED_S until all blocks are in the store; whether they are."""
        keys = [key for part in range(self._num_ranks) for key in block_keys(self._fingerprint, hashes, part)]
        try:
            are_there = await self._client.wait_for_many(keys, deadline_s=STORED_S) if keys else []
        except TanghuluError as error:
            _log.warning("vllm.prompt_not_stored", blocks=len(hashes), code=error.code, error=error.message)
            return False
        if not all(are_there):
            _log.warning("vllm.prompt_not_stored", blocks=len(hashes), keys=len(keys), there=sum(are_there))
        return all(are_there)

    async def close(self) -> None:
        """Close the client."""
        await self._client.close()
