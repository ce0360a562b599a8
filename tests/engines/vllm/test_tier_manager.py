"""The tier below vLLM's own manager of offloading, without an engine: each manager is one of an engine started anew."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

import tanghulu
from tests.engines.vllm.conftest import MODEL, Vllm
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(900)]
PROGRAM = Path(__file__).parent / "tier_process.py"
TEN = list(range(10))


def test_what_is_stored_is_loaded_and_what_is_lost_is_missing(vllm: Vllm, store: Cluster) -> None:
    with vllm.running(PROGRAM, {"master": store.address, "model": str(MODEL)}) as tier:
        assert tier.ask(do="load", numbers=TEN, rows=64) == {"chunks": 0}
        assert tier.ask(do="store", numbers=TEN, rows=64) == {"chunks": 10}
        assert tier.ask(do="load", numbers=[*TEN, 10, 11], rows=64) == {"chunks": 10}
        assert tier.ask(do="load", numbers=TEN, rows=4) == {"chunks": 4}, "there is room for 4"

        with tanghulu.connect(store.address) as client:
            name = hashlib.sha256(b"5").hexdigest()
            (spoilt,) = [info.key for info in client.list_keys("kv/") if info.key.split("/")[2] == name]
            client.remove(spoilt)
            assert client.put(spoilt, b"no chunk")
        assert tier.ask(do="load", numbers=TEN, rows=64) == {"chunks": 5}, "found, and its load failed"

        store.nodes[0].popen.send_signal(signal.SIGSTOP)
        assert tier.ask(do="load", numbers=TEN, rows=64) == {"chunks": 0}
        assert tier.ask(do="store", numbers=[20, 21], rows=64) == {"chunks": 2}, "in host memory"
        store.nodes[0].popen.send_signal(signal.SIGCONT)
        store.nodes[0].kill()
        store.master.kill()
        assert tier.ask(do="load", numbers=TEN, rows=64) == {"chunks": 0}
        assert tier.ask(do="store", numbers=[30], rows=64) == {"chunks": 1}, "in host memory"
