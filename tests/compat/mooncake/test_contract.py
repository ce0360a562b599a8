"""The contract of ``mooncake.store``: on ours, and on the original where it is installed."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tanghulu.compat.mooncake.store import MooncakeDistributedStore
from tests.compat.mooncake import contract
from tests.compat.mooncake.conftest import ENVIRONMENTS, run_in
from tests.compat.mooncake.contract import CASES, Memory
from tests.free_ports import free_port

numbered = pytest.mark.parametrize("number", range(len(CASES)), ids=[re.sub(r"\W+", "_", case.name) for case in CASES])


@pytest.fixture
def memory(store: MooncakeDistributedStore) -> Iterator[Memory]:
    memory = Memory(store)
    yield memory
    memory.close()


@numbered
def test_ours(store: MooncakeDistributedStore, memory: Memory, number: int) -> None:
    case = CASES[number]
    assert contract.outcome(case, number, store, memory) == case.expected


@pytest.fixture(scope="module")
def original() -> Any:
    """What the original, with a master of its own, makes of each case."""
    masters = list((ENVIRONMENTS / "mooncake").glob("lib/python*/site-packages/mooncake/mooncake_master"))
    if not masters:
        pytest.skip("extra: the environment is missing; tools/engine_venv.py mooncake builds it")
    port = free_port()
    flags = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
    master = subprocess.Popen([masters[0], *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    arguments = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 64 << 20,
        "local_buffer_size": 16 << 20,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": f"127.0.0.1:{port}",
    }
    try:
        printed = run_in("mooncake", Path(contract.__file__), json.dumps(arguments), ours=False)
    finally:
        master.kill()
        master.wait()
    return next(json.loads(line) for line in printed.splitlines() if line.startswith("["))


@pytest.mark.engine_mooncake
@numbered
def test_the_original(original: list[Any], number: int) -> None:
    case = CASES[number]
    assert original[number] == (case.expected if case.original is None else case.original)
