"""Our names of the blocks in an engine's cache: its events translated by their tokens, whatever its hashes are.

An engine names its blocks in a way of its own (vLLM's default pickles; SGLang's covers other bytes). Its BlockStored
events carry the tokens of the blocks and the hash of the preceding one, which is enough to give each block the name
that the conductor gives it: the name of the parent, then the tokens. A first block is preceded by the root of model and
tenant. The conductor sends the root of a salted request as its ``cache_salt``, and events show it among the extra keys
of the first block; without any, it is the model's own root.

Example: ``{hashes: [7, 9], parent: null, token_ids: [1 … 32], block_size: 16}`` names two blocks from the root of the
model, and ``{hashes: [4], parent: 9, …}`` the third of that prompt.

Blocks that cannot be named are skipped, with all that follow them: those with images, of another block size, of another
adapter, or of a parent whose event was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tanghulu.conductor.engines.events import EventDecoder, hashes_of
from tanghulu.hashing import Tokens, TokenSequence, as_tokens, chain_hashes, root_hash
from tanghulu.session.model_card import ModelCard
from tanghulu.session.outputs import KvChange
from tanghulu.types import BlockHash

#: Names remembered for each block of the engine's memory: a removed block may still be named as a parent.
_NAMES_PER_BLOCK, _MIN_NAMES = 4, 1 << 16


class BlockNames:
    """Names of one model's blocks at one engine. ``held`` are those it has in its cache, as far as is known."""

    def __init__(self, card: ModelCard, num_blocks: int, naming_key: bytes = b"", adapter: str = "") -> None:
        self.held: set[BlockHash] = set()
        self._card, self._key, self._adapter = card, naming_key, adapter
        self._own_root = self.root(b"")
        self._names: dict[BlockHash, BlockHash] = {}  # the engine's hash -> our name, the oldest first
        self._max_names = max(_MIN_NAMES, _NAMES_PER_BLOCK * num_blocks)

    def root(self, salt: bytes) -> BlockHash:
        """Return the name preceding the first block of a prompt with ``salt``."""
        return root_hash(self._card.fingerprint, salt, self._card.block_hash, self._key)

    def cache_salt(self, salt: bytes) -> str:
        """Return the salt by which the engine keeps the prompt's blocks apart; "" if it need not."""
        return self.root(salt).hex() if salt or self._key else ""

    def sequence(self, tokens: Tokens, salt: bytes) -> TokenSequence:
        """Return ``tokens`` with the names of their blocks."""
        return TokenSequence(self.root(salt), self._card.block_tokens, tokens, self._card.block_hash)

    def num_held(self, names: Sequence[BlockHash]) -> int:
        """Return the number of leading blocks in the engine's cache."""
        return next((i for i, name in enumerate(names) if name not in self.held), len(names))

    def apply(self, change: KvChange) -> KvChange:
        """Keep ``held`` up to date; return ``change``."""
        if change.cleared:
            self.held.clear()
        self.held.difference_update(change.removed)
        self.held.update(change.stored)
        return change

    def stored(self, hashes: Sequence[BlockHash], event: dict[str, Any]) -> tuple[BlockHash, ...]:
        """Return the names of the blocks of a BlockStored event; none if they cannot be named."""
        size, tokens = self._card.block_tokens, event.get("token_ids") or ()
        if event.get("block_size") != size or len(tokens) != size * len(hashes):
            return ()
        keys = [tuple(each or ()) for each in event.get("extra_keys") or [()] * len(hashes)]
        parent = self._parent(event, keys[0] if keys else ())
        own = (self._adapter,) if self._adapter else ()
        first = keys[0] if event.get("parent_block_hash") is not None else own
        if parent is None or any(key not in ((), own) for key in (first, *keys[1:])):
            return ()
        names = chain_hashes(parent, as_tokens(tokens), size, self._card.block_hash)
        for each, name in zip(hashes, names, strict=True):
            self._names.pop(each, None)
            self._names[each] = name
        while len(self._names) > self._max_names:
            del self._names[next(iter(self._names))]
        return tuple(names)

    def removed(self, hashes: Sequence[BlockHash]) -> tuple[BlockHash, ...]:
        """Return the names of removed blocks, as far as they have some."""
        return tuple(self._names[each] for each in hashes if each in self._names)

    def _parent(self, event: dict[str, Any], keys: tuple[Any, ...]) -> BlockHash | None:
        if (event.get("lora_name") or "") != self._adapter:
            return None
        before = event.get("parent_block_hash")
        if before is not None:
            return self._names.get(hashes_of((before,))[0])
        salts = [key for key in keys if key != self._adapter]
        if "cache_salt" in event:
            salts = [event["cache_salt"]] if event["cache_salt"] else []
        if not salts:
            return self._own_root
        return _root_in(salts[0]) if len(salts) == 1 else None


def _root_in(salt: object) -> BlockHash | None:
    """Return the root sent as ``cache_salt``; None for a salt of somebody else."""
    try:
        root = bytes.fromhex(salt) if isinstance(salt, str) else b""
    except ValueError:
        return None
    return BlockHash(root) if len(root) == 16 else None


class NamingDecoder(EventDecoder):
    """Decodes an engine's events to changes in our names."""

    def __init__(self, names: BlockNames) -> None:
        super().__init__()
        self._names = names

    def stored(self, hashes: tuple[BlockHash, ...], event: dict[str, Any]) -> tuple[BlockHash, ...]:
        """Return our names of the blocks."""
        return self._names.stored(hashes, event)

    def removed(self, hashes: tuple[BlockHash, ...]) -> KvChange:
        """Return the removal of our names."""
        return KvChange(removed=self._names.removed(hashes))
