"""vLLM on LMCache's server with the adapter: what one server has stored, a second one finds in the store.

By hand: LMCache's server and two vLLM processes take some minutes of CPU.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.lmcache.test_adapter import BIN, ENVIRONMENT
from tests.engines.vllm.conftest import MODEL, PYTHON, Vllm
from tests.engines.vllm.test_connector import prompts_of_2000_tokens
from tests.free_ports import free_port
from tests.store.cluster import Cluster

pytestmark = [
    pytest.mark.engine_lmcache,
    pytest.mark.engine_vllm,
    pytest.mark.slow,
    pytest.mark.by_hand,
    pytest.mark.timeout(3000),
]
ENGINE = Path(__file__).parents[1] / "vllm" / "engine_process.py"
START_S, END_S = 300.0, 60.0
#: How vLLM's memory, which is no GPU's, reaches the server; both sides must say so.
DRIVEN = {"LMCACHE_MP_TRANSFER_MODE": "engine_driven"}


@contextlib.contextmanager
def lmcache_server(store: Cluster, log: Path) -> Iterator[int]:
    """LMCache's server on the store, with an empty memory of its own; yields its port."""
    port, adapter = free_port(), {"type": "plugin", "module_path": "tanghulu.engines.lmcache.adapter"}
    adapter |= {"class_name": "TanghuluL2Adapter", "adapter_params": {"master": store.address}}
    command = [BIN / "lmcache", "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(free_port())]
    command += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", "64", "--shm-name", f"lmcache-{port}"]
    command += ["--supported-transfer-mode", "engine_driven", "--l2-adapter", json.dumps(adapter)]
    with log.open("ab") as output:
        process = subprocess.Popen(command, env=ENVIRONMENT | DRIVEN, stdout=output, stderr=output)
    try:
        until_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, log.read_text(errors="replace")[-5000:]
            assert time.monotonic() < until_s, "it does not listen"
            time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_vllm_behind_another_server_finds_what_the_first_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not (PYTHON.exists() and MODEL.exists() and BIN.exists()):
        pytest.skip("extra: an environment is missing; tools/engine_venv.py vllm and lmcache build them")
    (packages,) = BIN.parent.glob("lib/python*/site-packages")
    for name, value in {**DRIVEN, "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}.items():
        monkeypatch.setenv(name, value)
    vllm, answers = Vllm(tmp_path), []
    with Cluster(1, "2GiB", checked=False) as store:
        for number in range(2):
            with lmcache_server(store, tmp_path / f"server-{number}.log") as port:
                transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}
                transfer |= {"kv_load_failure_policy": "recompute"}
                transfer["kv_connector_extra_config"] = {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": port,
                }
                spec = {"model": str(MODEL), "dtype": "float32", "transfer": transfer, "beside": [str(packages)]}
                *answered, _ = vllm.run(ENGINE, spec | {"prompts": prompts_of_2000_tokens()})
                answers.append(answered)
    cold, loaded = answers
    print([(one["ttft_s"], two["ttft_s"], two["cached"]) for one, two in zip(cold, loaded, strict=True)])
    assert [each["cached"] for each in cold] == [0, 1024, 0, 0], "its own prefix cache, or the server's memory"
    assert [each["answered"] for each in loaded] == [each["answered"] for each in cold]
    assert all(each["cached"] >= 1920 for each in loaded), loaded
