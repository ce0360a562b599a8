"""The connectors that are compared: the servers of each, and what vLLM is told to use it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tanghulu
from benchmarks.peers import clusters, environments
from benchmarks.peers.jsonlines import cpu_s

ENGINES = Path.home() / ".cache" / "tanghulu" / "engines"
HELD_BYTES = 2 << 30
MIB = 1 << 20
#: Its server imports torch and transformers first.
_LMCACHE_START_S = 180.0


@dataclass
class Arm:
    """A connector whose servers run."""

    #: vLLM's --kv-transfer-config; None for no connector.
    transfer: dict[str, Any] | None = None
    #: Folders of packages that the engine's environment lacks.
    beside: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    #: Whether another process can find anything.
    shares: bool = True
    #: Bytes that are kept for other processes; None where nobody says so.
    held_bytes: Callable[[], int | None] = lambda: None

    def servers_cpu_s(self) -> float:
        return cpu_s(self.pids)


def inherited() -> dict[str, str]:
    """This process's environment, but for what keeps modules from being compiled once, as those of a package are."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _connector(name: str, extra: Mapping[str, Any], module: str | None = None) -> dict[str, Any]:
    transfer = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}
    # Of a prefix that is lost while it is loaded nothing is computed anew by default.
    transfer |= {"kv_load_failure_policy": "recompute"}
    return transfer | ({"kv_connector_module_path": module} if module is not None else {})


@contextlib.contextmanager
def nothing() -> Iterator[Arm]:
    """Plain vLLM, with its own prefix cache within a process."""
    yield Arm(shares=False, held_bytes=lambda: 0)


def _stored(master: str, prefix: str) -> int:
    with tanghulu.connect(master) as client:
        return sum(info.size_bytes for info in client.list_keys(prefix))


@contextlib.contextmanager
def tanghulu_connector() -> Iterator[Arm]:
    """TanghuluConnector, with a master and a node."""
    with clusters.tanghulu(HELD_BYTES) as store:
        master = store.settings["master"]
        transfer = _connector("TanghuluConnector", {"master": master}, "tanghulu.engines.vllm.connector")
        yield Arm(transfer, pids=store.pids, held_bytes=lambda: _stored(master, "kv/"))


def _offloading(tier: dict[str, Any]) -> dict[str, Any]:
    """vLLM's native offloading, with copies in host memory where it knows only GPUs' (see ``cpu_offloading``)."""
    spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "tests.engines.vllm.cpu_offloading"}
    return _connector("OffloadingConnector", spec | {"cpu_bytes_to_use": 512 * MIB, "secondary_tiers": [tier]})


@contextlib.contextmanager
def tanghulu_tier() -> Iterator[Arm]:
    """vLLM's native offloading with tanghulu's store as its second level."""
    with clusters.tanghulu(HELD_BYTES) as store:
        master = store.settings["master"]
        tier = {"type": "TanghuluTier", "module_path": "tanghulu.engines.vllm.tier", "master": master}
        yield Arm(_offloading(tier), pids=store.pids, held_bytes=lambda: _stored(master, "kv/"))


@contextlib.contextmanager
def vllm_files() -> Iterator[Arm]:
    """vLLM's native offloading with its own second level: files, here in memory."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-offload-", dir="/dev/shm"))
    try:
        yield Arm(
            _offloading({"type": "fs", "root_dir": str(folder), "n_read_threads": 2, "n_write_threads": 2}),
            held_bytes=lambda: sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
        )
    finally:
        shutil.rmtree(folder)


@contextlib.contextmanager
def lmcache() -> Iterator[Arm]:
    """LMCache's server with memory of its own, asked by its connector of vLLM."""
    folder = ENGINES / "lmcache"
    if not (folder / ".ready").exists():
        raise environments.Missing("tools/engine_venv.py lmcache")
    (packages,) = folder.glob("lib/python*/site-packages")
    port, http_port = clusters.free_port(), clusters.free_port()
    environment = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_MP_TRANSFER_MODE": "engine_driven"}
    command = [
        folder / "bin" / "lmcache", "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port),
        "--l1-size-gb", "2", "--eviction-policy", "LRU", "--chunk-size", "64",
        "--supported-transfer-mode", "engine_driven", "--shm-name", f"lmcache-bench-{os.getpid()}",
    ]  # fmt: skip
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    with clusters.running(command, "lmcache_server.log", env=inherited() | environment) as child:
        clusters.wait_for_port(port, child, "lmcache_server.log", _LMCACHE_START_S)
        yield Arm(_connector("LMCacheMPConnector", extra), [str(packages)], environment, [child.pid])


@contextlib.contextmanager
def mooncake() -> Iterator[Arm]:
    """vLLM's connector of Mooncake's store, whose memory is in a process of its own."""
    with clusters.mooncake(HELD_BYTES) as store, tempfile.TemporaryDirectory() as folder:
        settings = {
            "mode": "standalone-store",
            "metadata_server": store.settings["metadata"],
            "master_server_address": store.settings["master"],
            "protocol": "tcp",
            "global_segment_size": 0,
            "local_buffer_size": 256 * MIB,
        }
        path = Path(folder) / "mooncake.json"
        path.write_text(json.dumps(settings))
        transfer = _connector("MooncakeOnCpus", {"load_async": True}, "benchmarks.engines.mooncake_on_cpus")
        packages = str(environments.packages_folder("mooncake"))
        environment = {"MOONCAKE_CONFIG_PATH": str(path), "GLOG_minloglevel": "2"}
        yield Arm(transfer, [packages], environment, store.pids)


ARMS: dict[str, Callable[[], contextlib.AbstractContextManager[Arm]]] = {
    "none": nothing,
    "tanghulu": tanghulu_connector,
    "tanghulu-tier": tanghulu_tier,
    "vllm-files": vllm_files,
    "lmcache": lmcache,
    "mooncake": mooncake,
}
