"""Choice of the prefill and decode pools of a request: a grid of lengths and targets, read from a file and validated.

Pure. A pool is a namespace with its own conductors and workers: larger ones for long prompts, faster ones for tight
targets. The file (TOML, or JSON of the same shape):

    characters_per_token = 4.0          # how lengths of texts are estimated

    [[pool]]
    name = "short"                      # the namespace
    urls = ["http://10.0.0.1:8000"]     # its conductors, besides those found by discovery in the namespace
    fallback = ["long"]                 # pools that serve when it cannot

    [[pool]]
    name = "long"

    [prefill]                           # a row for each TTFT target, a column for each prompt length
    ttft_s = [1.0, 10.0]
    prompt_tokens = [4096, 131072]
    pools = [["short", "long"], ["short", "short"]]

    [decode]                            # a row for each TBT target, a column for each context length
    tbt_s = [0.05]
    context_tokens = [8192, 131072]
    pools = [["short", "long"]]

Bounds are upper bounds in ascending order. A request takes the first row and column that its target and length do not
exceed, or the last if none; without a target it takes the last row. Example: a prompt of 6,000 tokens with a TTFT
target of 1 s is prefilled by "long"; without a target by "short".
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct, structs

from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.config import read_table
from tanghulu.types import parse_url

DEFAULT_CHARACTERS_PER_TOKEN = 4.0
#: Upper limit of a number in the file; a target of 1e9 s means none.
_MOST = 1e9


class Pool(Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace of workers. ``fallback``: names of the pools that serve when this one cannot, in order."""

    name: Annotated[str, Meta(min_length=1)]
    urls: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """The length of a request and its targets, None if absent."""

    prompt_tokens: int
    context_tokens: int
    ttft_s: float | None = None
    tbt_s: float | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """``pools[row][column]``; both bounds ascend."""

    targets_s: tuple[float, ...]
    lengths: tuple[int, ...]
    pools: tuple[tuple[str, ...], ...]

    def choose(self, length: int, target_s: float | None) -> str:
        last = len(self.targets_s) - 1
        row = last if target_s is None else min(last, bisect.bisect_left(self.targets_s, target_s))
        column = min(len(self.lengths) - 1, bisect.bisect_left(self.lengths, length))
        return self.pools[row][column]


@dataclass(frozen=True, slots=True)
class PoolMap:
    """The contents of the whole file."""

    pools: Mapping[str, Pool]
    prefill: Grid
    decode: Grid
    characters_per_token: float = field(default=DEFAULT_CHARACTERS_PER_TOKEN)

    def choose(self, demand: Demand) -> tuple[str, str]:
        """Return (pool that prefills, pool that decodes)."""
        prefill = self.prefill.choose(demand.prompt_tokens, demand.ttft_s)
        return prefill, self.decode.choose(demand.context_tokens, demand.tbt_s)

    def ways(self, name: str) -> Iterator[str]:
        """Yield the pool ``name``, then its fallbacks and theirs, each once."""
        seen, waiting = {name}, [name]
        while waiting:
            current = waiting.pop(0)
            yield current
            for other in self.pools[current].fallback:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)


def read_pools(path: Path) -> PoolMap:
    """Read the pool map in ``path``. Raises ConfigError with the fault and its position."""
    data = read_table(path, "pools", is_json=path.suffix == ".json")
    try:
        return parse_pools(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


_Number: TypeAlias = Annotated[float, Meta(gt=0, le=_MOST)]
_Bounds: TypeAlias = Annotated[list[_Number], Meta(min_length=1)]
_Cells: TypeAlias = list[list[str]]


class _PrefillGrid(Struct, forbid_unknown_fields=True):
    ttft_s: _Bounds
    prompt_tokens: _Bounds
    pools: _Cells


class _DecodeGrid(Struct, forbid_unknown_fields=True):
    tbt_s: _Bounds
    context_tokens: _Bounds
    pools: _Cells


class _File(Struct, forbid_unknown_fields=True):
    pool: Annotated[list[Pool], Meta(min_length=1)]
    prefill: _PrefillGrid
    decode: _DecodeGrid
    characters_per_token: _Number = DEFAULT_CHARACTERS_PER_TOKEN


def parse_pools(data: Any) -> PoolMap:
    """Build the pool map from parsed TOML or JSON. Raises ConfigError."""
    try:
        if isinstance(data, dict) and (unknown := sorted(data.keys() - set(_File.__struct_fields__))):
            raise ConfigError(f"unknown key {unknown[0]!r}; the known keys are {', '.join(_File.__struct_fields__)}")
        file = msgspec.convert(data, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from None
    except OverflowError as error:
        raise ConfigError(f"a bound is out of range: {error}") from None
    pools = _pools(file.pool)
    prefill = _grid("prefill", file.prefill.ttft_s, file.prefill.prompt_tokens, file.prefill.pools, pools)
    decode = _grid("decode", file.decode.tbt_s, file.decode.context_tokens, file.decode.pools, pools)
    return PoolMap(pools, prefill, decode, file.characters_per_token)


def _pools(rows: Sequence[Pool]) -> dict[str, Pool]:
    pools: dict[str, Pool] = {}
    for row in rows:
        if row.name in pools:
            raise ConfigError(f"pool {row.name!r} is defined twice")
        try:
            pools[row.name] = structs.replace(row, urls=tuple(parse_url(url) for url in row.urls))
        except InvalidRequest as error:
            raise ConfigError(f"pool {row.name!r}: {error.message}") from None
    for pool in pools.values():
        _check_known(pool.fallback, pools, f"the fallback of pool {pool.name!r}")
    return pools


def _grid(
    name: str, targets: Sequence[float], lengths: Sequence[float], cells: _Cells, pools: Mapping[str, Pool]
) -> Grid:
    for bounds in (targets, lengths):
        if any(one >= other for one, other in itertools.pairwise(bounds)):
            raise ConfigError(f"[{name}] has the bounds {bounds}; sort them in ascending order")
    if len(cells) != len(targets) or any(len(row) != len(lengths) for row in cells):
        raise ConfigError(
            f"[{name}] pools must have a row for each of the {len(targets)} targets, "
            f"with a name for each of the {len(lengths)} lengths"
        )
    for row in cells:
        _check_known(row, pools, f"[{name}] pools")
    return Grid(tuple(targets), tuple(map(int, lengths)), tuple(map(tuple, cells)))


def _check_known(names: Iterable[str], pools: Mapping[str, Pool], where: str) -> None:
    for name in names:
        if name not in pools:
            raise ConfigError(f"{where} names the unknown pool {name!r}; the pools are {', '.join(pools)}")
