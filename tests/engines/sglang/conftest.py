"""The connector on SGLang's recorded interface, and a store in memory."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from tanghulu.engines.common.options import StoreOptions
from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.store.client.model import Status
from tests.engines.sglang import interface

PAGE_TOKENS, NUM_PAGES, TOKEN_BYTES = 4, 16, 32


class Chunks:
    """As much of the client as the connector uses; every call raises ``error`` where it is given."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.error: TanghuluError | None = None
        self.calls: list[tuple[str, int]] = []

    def _call(self, name: str, num_keys: int) -> None:
        self.calls.append((name, num_keys))
        if self.error is not None:
            raise self.error

    def exists(self, key: str, *, deadline_s: float | None = None) -> bool:
        return self.exists_many([key])[0]

    def exists_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        self._call("exists", len(keys))
        return [key in self.kept for key in keys]

    def get_many_into(
        self, keys: Sequence[str], buffers: Sequence[Any], *, deadline_s: float | None = None
    ) -> list[int | TanghuluError]:
        self._call("get", len(keys))
        return [self._into(key, pieces) for key, pieces in zip(keys, buffers, strict=True)]

    def _into(self, key: str, pieces: Sequence[Any]) -> int | TanghuluError:
        value = self.kept.get(key)
        if value is None or len(value) != sum(memoryview(piece).nbytes for piece in pieces):
            return ChunkNotFound(key)  # `KvClient` has removed one of another size
        at = 0
        for piece in map(memoryview, pieces):
            part = value[at : at + piece.nbytes]
            piece.cast("B")[: len(part)] = part
            at += piece.nbytes
        return len(value)

    def put_many(self, items: Any, *, deadline_s: float | None = None) -> list[Status]:
        self._call("put", len(items))
        for key, pieces in items:
            self.kept.setdefault(key, b"".join(bytes(piece) for piece in pieces))
        return [Status(key) for key, _ in items]

    def remove_many(self, keys: Sequence[str], *, deadline_s: float | None = None) -> list[bool]:
        return [self.kept.pop(key, None) is not None for key in keys]

    def remove_matching(self, pattern: str, *, deadline_s: float | None = None) -> int:
        gone = [key for key in self.kept if re.search(pattern, key)]
        for key in gone:
            del self.kept[key]
        return len(gone)

    def close(self) -> None: ...


class Pool:
    """As much of SGLang's host pools as the connector uses: pages of two pieces, keys and values."""

    layout = "page_first"
    dtype = "float32"

    def __init__(self, page_tokens: int = PAGE_TOKENS, **form: Any) -> None:
        self.page_size = page_tokens
        self.kv_buffer = np.random.default_rng().integers(0, 256, (2, NUM_PAGES * page_tokens, TOKEN_BYTES), np.uint8)
        for name, value in form.items():
            setattr(self, name, value)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        places = [int(index) * TOKEN_BYTES for index in indices[:: self.page_size]]
        bases = [part.ctypes.data for part in self.kv_buffer]
        addresses = [base + place for place in places for base in bases]
        return addresses, [self.page_size * TOKEN_BYTES] * len(addresses)

    def page(self, number: int) -> bytes:
        part: bytes = self.kv_buffer[:, number * self.page_size : (number + 1) * self.page_size].tobytes()
        return part


def indices(*pages: int, page_tokens: int = PAGE_TOKENS) -> list[int]:
    """The places of the tokens of ``pages``."""
    return [page * page_tokens + at for page in pages for at in range(page_tokens)]


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Chunks:
    kept = Chunks()
    monkeypatch.setattr(StoreOptions, "open_client", lambda self: kept)
    return kept


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """The connector's module, on the recorded interface."""
    made = interface.install()
    from tanghulu.engines.sglang import hicache

    yield hicache
    for name in [*made, hicache.__name__]:
        del sys.modules[name]


@pytest.fixture
def backend(module: Any, chunks: Chunks) -> Callable[..., Any]:
    """Makes a connector with a pool for the prompt's pages; ``extra``: options beside the master."""

    def make(pool: Any = None, extra: dict[str, Any] | None = None, **config: Any) -> Any:
        ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1}
        kind = {"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True}
        options = {"master": "127.0.0.1:1", "interface_v1": 1, **(extra or {})}
        given = {**ranks, **kind, "model_name": "org/model", "extra_config": options, **config}
        made = module.TanghuluHiCache(interface.HiCacheStorageConfig(**given), {})
        made.register_mem_pool_host(Pool() if pool is None else pool)
        return made

    return make
