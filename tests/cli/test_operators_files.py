"""Files that operators write: whatever stands where in them, the answer is a table or a ConfigError."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tanghulu.auth.api_keys import ApiKeysFile
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tokens import TokensFile
from tanghulu.conductor.pool_router.grid import read_pools
from tanghulu.conductor.routing.profiles import read_profiles
from tanghulu.errors import ConfigError
from tanghulu.transfer_engine.topology import discovery

TENANT = {"quota": "1GiB", "cluster_quota": 5, "shared_memory": True}
READER = {"name": "b", "tenant": "acme", "rights": ["read"], "sha256": hash_of("b"), "expires": "2099-01-01"}
LIMITS = {"requests_per_s": 1.5, "tokens_per_minute": 5, "max_in_flight": 3, "weight": 2, "shared_prefixes": True}
GRID = {"prompt_tokens": [1000], "ttft_s": [1.0], "pools": [["one"]]}
DEVICE = {"name": "eth0", "address": "10.0.0.1/24", "numa_node": 0, "speed_mbit_s": 1, "up": True, "loopback": False}
FILES: dict[str, tuple[Callable[[Path], Any], Any]] = {
    "tokens": (
        TokensFile,
        {
            "tenants": {"acme": TENANT},
            "tokens": [{"name": "a", "rights": ["join"], "sha256": hash_of("a")}, READER],
        },
    ),
    "keys": (ApiKeysFile, {"keys": [READER | {"rights": ["inference"]} | LIMITS]}),
    "pools": (
        read_pools,
        {
            "pool": [{"name": "one", "urls": ["http://h:1"]}],
            "prefill": GRID,
            "decode": {"context_tokens": [1000], "tbt_s": [1.0], "pools": [["one"]]},
        },
    ),
    "profiles": (read_profiles, {"m": {"prefill": {"fixed_s": 0.5}, "decode": {"sequence_s": 1e-4}}}),
    "topology": (
        lambda path: discovery.load(str(path)),
        {"devices": [DEVICE], "matrix": {"cpu:0": {"preferred": ["eth0"], "others": []}}},
    ),
}
ODD = [None, True, 0, -1, 10**30, 1e308, float("nan"), float("inf"), "", "x", "\0", "a" * 3000]
ODD += [[], [1], ["x"], [None], [[]], [{}], {}, {"a": 1}, {"": {}}]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in below:
        yield from _places(each, (*place, key))


def _with(value: Any, place: tuple[Any, ...], odd: Any) -> Any:
    if not place:
        return odd
    changed = copy.copy(value)
    changed[place[0]] = _with(value[place[0]], place[1:], odd)
    return changed


@pytest.mark.parametrize("name", FILES)
def test_whatever_stands_in_a_file(name: str, tmp_path: Path) -> None:
    read, content = FILES[name]
    file = tmp_path / "file.json"
    file.touch(0o600)
    file.write_text(json.dumps(content))
    read(file)
    num_refused = 0
    for place in _places(content):
        for odd in ODD:
            file.write_text(json.dumps(_with(content, place, odd)))
            try:
                read(file)
            except ConfigError:
                num_refused += 1
    assert num_refused > len(ODD), "some of it is wrong in every place"
