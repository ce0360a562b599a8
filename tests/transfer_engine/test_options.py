"""The flags of nodes and workers that concern the transfer engine, and the figures that they publish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tanghulu.errors import ConfigError
from tanghulu.runtime.clock import SystemClock
from tanghulu.transfer_engine.client.remote import RemoteSegment
from tanghulu.transfer_engine.core.config import EngineConfig, ListenOptions, ServerLimits
from tanghulu.transfer_engine.core.segment import NO_SESSION, Endpoint, MemorySegment, SegmentDescriptor
from tanghulu.transfer_engine.core.transport import ConnectContext
from tanghulu.transfer_engine.engine import Opcode, TransferEngine, TransferRequest
from tanghulu.transfer_engine.metrics import EngineCollector, ServerCollector
from tanghulu.transfer_engine.options import TransferOptions, transfer_settings
from tanghulu.transfer_engine.server import SegmentServer
from tanghulu.transfer_engine.topology.devices import NetworkDevice, Topology, matrix_of
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess

DEVICES = (
    NetworkDevice("eth0", "10.0.0.1/24", 0, 25_000),
    NetworkDevice("eth1", "10.0.1.1/24", 1, 25_000),
    NetworkDevice("eth2", "10.0.2.1/24", 1, 25_000),
    NetworkDevice("dark", "10.0.3.1/24", 0, 25_000, up=False),
)


@pytest.fixture
def topology_file(tmp_path: Path) -> str:
    path = tmp_path / "topology.json"
    path.write_text(Topology(DEVICES, matrix_of(DEVICES, [0, 1])).to_json())
    return str(path)


def test_the_defaults_offer_what_works_everywhere():
    settings = transfer_settings(TransferOptions(), "127.0.0.1")
    assert settings.transports == ("shm", "tcp")
    assert settings.engine == EngineConfig()
    assert settings.listen == ListenOptions(transports=("shm", "tcp"), host="127.0.0.1")
    assert settings.limits == ServerLimits()


def test_devices_near_the_memory_come_first(topology_file: str):
    options = TransferOptions(
        topology=topology_file, near="cpu:1", transports="rdma,tcp", rdma_devices="mlx5_1, mlx5_0"
    )
    settings = transfer_settings(options, "0.0.0.0")
    assert settings.listen.tcp_devices == (("eth1", "10.0.1.1"), ("eth2", "10.0.2.1"), ("eth0", "10.0.0.1"))
    assert settings.listen.tcp_distances == {"eth1": 0, "eth2": 0, "eth0": 1}
    assert settings.listen.transports == ("rdma", "tcp")
    assert settings.listen.rdma_devices == settings.engine.rdma_devices == ("mlx5_1", "mlx5_0")
    assert settings.engine.location == "cpu:1"


def test_some_of_the_devices(topology_file: str):
    settings = transfer_settings(TransferOptions(topology=topology_file, tcp_devices="eth2,eth0"), "0.0.0.0")
    assert {name for name, _ in settings.listen.tcp_devices} == {"eth0", "eth2"}
    assert settings.engine.topology is not None
    assert {each.name for each in settings.engine.topology.usable} == {"eth0", "eth2"}


@pytest.mark.parametrize(
    ("wrong", "host", "named"),
    [
        ({"transports": "shm,pigeon"}, "0.0.0.0", "--transports"),
        ({"transports": "shm,tcp,shm"}, "0.0.0.0", "each once"),
        ({"transports": "shm"}, "0.0.0.0", "tcp must be among them"),
        ({"rdma_devices": "mlx5_0"}, "0.0.0.0", "--rdma-devices"),
        ({"tcp_devices": "dark"}, "0.0.0.0", "--tcp-devices: dark"),
        ({}, "10.0.0.1", "--host 0.0.0.0"),
        ({"near": "gpu:7"}, "0.0.0.0", "--near gpu:7 is not a row of the matrix, which has cpu:0, cpu:1"),
        ({"near": "cpu:0", "topology": ""}, "0.0.0.0", "--near cpu:0 requires --topology"),
        ({"topology": "/nowhere.json"}, "0.0.0.0", "nowhere"),
    ],
)
def test_what_cannot_be_meant_names_its_flag(wrong: dict[str, Any], host: str, named: str, topology_file: str):
    with pytest.raises(ConfigError, match=named):
        transfer_settings(TransferOptions(**({"topology": topology_file} | wrong)), host)


def remote_over_tcp(descriptor: SegmentDescriptor, config: EngineConfig) -> RemoteSegment:
    context = ConnectContext(descriptor, NO_SESSION, config)
    return RemoteSegment(context, {"tcp": tcp.connect(context)}, SystemClock())


def test_clients_prefer_what_the_owner_prefers(engine: TransferEngine):
    near, far = Endpoint("tcp", "10.0.0.1:1", "eth0"), Endpoint("tcp", "10.0.1.1:1", "eth1", distance=1)
    descriptor = SegmentDescriptor("s", 1, "elsewhere", 1, (far, near))
    remote = remote_over_tcp(descriptor, engine.config)
    assert [path.endpoint for path in remote.paths.paths] == [near, near, far, far]
    topology = Topology((NetworkDevice("a", "10.0.0.9/24"), NetworkDevice("b", "10.0.1.9/24")))
    remote = remote_over_tcp(descriptor, EngineConfig(topology=topology))
    assert [(path.local_device, path.rank) for path in remote.paths.paths] == [("a", 0), ("a", 0), ("b", 1), ("b", 1)]
    remote.close()


def scraped(*collectors: Any) -> dict[tuple[str, str], float]:
    """By (name, transport)."""
    registry = CollectorRegistry()
    for each in collectors:
        registry.register(each)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = (sample for family in families for sample in family.samples)
    return {
        (sample.name, sample.labels.get("transport", "")): sample.value
        for sample in samples
        if sample.labels.get("le", "+Inf") == "+Inf"
    }


def test_what_paths_did_is_published(engine: TransferEngine, owner: SegmentProcess):
    for transport in ("shm", "tcp"):
        remote = engine.open_segment(owner.descriptor, transport=transport)
        engine.transfer([TransferRequest(Opcode.READ, bytearray(1000), remote, 0, 1000)], 5)
        engine.transfer([TransferRequest(Opcode.WRITE, bytes(3 << 20), remote, 0, 3 << 20, verify=True)], 5)
    figures = scraped(EngineCollector(engine))
    for transport, slices in (("shm", 2), ("tcp", 4)):
        assert figures["tanghulu_transfer_bytes_total", transport] == 1000 + (3 << 20)
        assert figures["tanghulu_transfer_slices_total", transport] == slices
        assert figures["tanghulu_transfer_slice_seconds_bucket", transport] == slices
        assert figures["tanghulu_transfer_slice_seconds_sum", transport] > 0
        assert figures["tanghulu_transfer_in_flight_bytes", transport] == 0
        assert figures["tanghulu_transfer_errors_total", transport] == 0
    remote.close()
    assert scraped(EngineCollector(engine))["tanghulu_transfer_bytes_total", "tcp"] == 0


async def test_what_peers_did_is_published():
    segment = MemorySegment.create("mine", 1 << 20)
    listen = ListenOptions(host="127.0.0.1")
    server = SegmentServer(segment, None, generation=1, host_id=HOST_ID, listen=listen, on_notice=lambda *_: None)
    await server.start()
    with TransferEngine(host_id="elsewhere") as engine:
        remote = await engine.open_segment_async(server.descriptor())
        request = TransferRequest(Opcode.WRITE, bytes(1000), remote, 0, 1000, notify=b"done")
        await engine.transfer_async([request], 5)
    figures = scraped(ServerCollector(server))
    assert figures["tanghulu_segment_written_bytes_total", "tcp"] == 1000
    assert figures["tanghulu_segment_notices_total", ""] == 1
    assert figures["tanghulu_segment_refused_total", ""] == 0
    await server.close()
    segment.close()
