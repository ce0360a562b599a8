"""Which pool prefills a request and which decodes it: a grid of lengths and targets, read from a file and validated.

Pure. A pool is a namespace with its own conductors and workers: larger ones for long prompts, faster ones for tight
targets. The file (TOML, or JSON of the same shape):

    characters_per_token = 4.0          # how lengths of texts are estimated

    [[pool]]
    name = "short"                      # the namespace
    urls = ["http://10.0.0.1:8000"]     # its conductors, besides those that discovery finds in the namespace
    fallback = ["long"]                 # who serves when it cannot

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

Bounds are upper ones and ascend. A request takes the first row and column that its target and its length do not exceed;
beyond the last it takes the last; without a target it takes the last row. Example: a prompt of 6,000 tokens with a TTFT
target of 1 s is prefilled by "long"; without a target by "short".
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.runtime.config import read_table
from tanghulu.types import parse_url

DEFAULT_CHARACTERS_PER_TOKEN = 4.0
#: The most of a number in the file; a target of 1e9 s is none.
_MOST = 1e9


@dataclass(frozen=True, slots=True)
class Pool:
    """A namespace of workers. ``fallback``: names of the pools that serve when this one cannot, in order."""

    name: str
    urls: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """The length of a request and its targets, None where it has none."""

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
    """The whole file."""

    pools: Mapping[str, Pool]
    prefill: Grid
    decode: Grid
    characters_per_token: float = field(default=DEFAULT_CHARACTERS_PER_TOKEN)

    def choose(self, demand: Demand) -> tuple[str, str]:
        """(pool that prefills, pool that decodes)."""
        prefill = self.prefill.choose(demand.prompt_tokens, demand.ttft_s)
        return prefill, self.decode.choose(demand.context_tokens, demand.tbt_s)

    def ways(self, name: str) -> Iterator[str]:
        """The pool ``name``, then its fallbacks and theirs, each once."""
        seen, waiting = {name}, [name]
        while waiting:
            current = waiting.pop(0)
            yield current
            for other in self.pools[current].fallback:
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)


def read_pools(path: Path) -> PoolMap:
    """The pool map in ``path``. Raises ConfigError that says what is wrong and where."""
    data = read_table(path, "pools", is_json=path.suffix == ".json")
    try:
        return parse_pools(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None


def parse_pools(data: Any) -> PoolMap:
    """The pool map from parsed TOML or JSON. Raises ConfigError."""
    _keys(data, "the file", {"pool", "prefill", "decode"}, {"characters_per_token"})
    pools = _pools(data["pool"])
    ratio = data.get("characters_per_token", DEFAULT_CHARACTERS_PER_TOKEN)
    if not _is_number(ratio) or ratio <= 0:
        raise ConfigError(f"characters_per_token is {ratio!r}, not a number above 0")
    prefill = _grid("prefill", data["prefill"], "ttft_s", "prompt_tokens", pools)
    return PoolMap(pools, prefill, _grid("decode", data["decode"], "tbt_s", "context_tokens", pools), float(ratio))


def _pools(rows: Any) -> dict[str, Pool]:
    if not isinstance(rows, list) or not rows:
        raise ConfigError("'pool' is not a list with at least one pool")
    pools: dict[str, Pool] = {}
    for row in rows:
        _keys(row, "a pool", {"name"}, {"urls", "fallback"})
        name = row["name"]
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the pool name {name!r} is not a text")
        try:
            urls = tuple(parse_url(url) for url in _names(row, "urls"))
        except InvalidRequest as error:
            raise ConfigError(f"pool {name!r}: {error.message}") from None
        pool = Pool(name, urls, _names(row, "fallback"))
        if pool.name in pools:
            raise ConfigError(f"there are two pools {pool.name!r}")
        pools[pool.name] = pool
    for pool in pools.values():
        _known(pool.fallback, pools, f"the fallback of pool {pool.name!r}")
    return pools


def _grid(name: str, table: Any, targets: str, lengths: str, pools: Mapping[str, Pool]) -> Grid:
    _keys(table, f"[{name}]", {targets, lengths, "pools"}, set())
    rows, columns, cells = _bounds(table, name, targets), _bounds(table, name, lengths), table["pools"]
    shaped = isinstance(cells, list) and all(isinstance(row, list) for row in cells)
    if not shaped or len(cells) != len(rows) or any(len(row) != len(columns) for row in cells):
        raise ConfigError(
            f"[{name}] pools must have a row for each of the {len(rows)} {targets}, "
            f"with a name for each of the {len(columns)} {lengths}"
        )
    for row in cells:
        _known(row, pools, f"[{name}] pools")
    return Grid(rows, tuple(int(c) for c in columns), tuple(tuple(row) for row in cells))


def _bounds(table: Mapping[str, Any], name: str, key: str) -> tuple[float, ...]:
    values = table[key]
    if not isinstance(values, list) or not values or not all(_is_number(v) and v > 0 for v in values):
        raise ConfigError(f"[{name}] {key} is {values!r}, not a list of numbers above 0")
    if any(one >= other for one, other in itertools.pairwise(values)):
        raise ConfigError(f"[{name}] {key} is {values!r}; the bounds must ascend")
    return tuple(values)


def _keys(table: Any, where: str, needed: set[str], more: set[str]) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is not a table")
    for key in sorted(table.keys() - needed - more):
        raise ConfigError(f"{where} has an unknown key {key!r}; there is {', '.join(sorted(needed | more))}")
    for key in sorted(needed - table.keys()):
        raise ConfigError(f"{where} has no {key!r}")


def _names(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    values = row.get(key, [])
    if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
        raise ConfigError(f"pool {row['name']!r}: {key} is {values!r}, not a list of texts")
    return tuple(values)


def _known(names: Sequence[Any], pools: Mapping[str, Pool], where: str) -> None:
    for name in names:
        if not isinstance(name, str) or name not in pools:
            raise ConfigError(f"{where} names {name!r}, which is no pool; there is {', '.join(pools)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
