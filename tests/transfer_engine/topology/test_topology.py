"""Devices, the matrix, pairs, and the file that replaces what is discovered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tanghulu.errors import ConfigError
from tanghulu.transfer_engine.client.remote import RemoteSegment
from tanghulu.transfer_engine.core.config import EngineConfig
from tanghulu.transfer_engine.core.segment import NO_SESSION, Endpoint, SegmentDescriptor
from tanghulu.transfer_engine.core.transport import ConnectContext
from tanghulu.transfer_engine.topology.devices import (
    Gpu,
    NetworkDevice,
    Preference,
    Topology,
    from_json,
    matrix_of,
    pair,
)
from tanghulu.transfer_engine.topology.discovery import discover, load
from tanghulu.transfer_engine.topology_command import COMMAND
from tanghulu.transfer_engine.transports.tcp import transport as tcp
from tests.virtual.clock import ManualClock

ETH0 = NetworkDevice("eth0", "10.0.0.1/24", numa_node=0, speed_mbit_s=25_000)
ETH1 = NetworkDevice("eth1", "10.0.1.1/24", numa_node=1, speed_mbit_s=100_000)
ETH2 = NetworkDevice("eth2", "fd00::1/64", numa_node=-1, speed_mbit_s=10_000)
LO = NetworkDevice("lo", "127.0.0.1/8", loopback=True)


def test_the_matrix_prefers_devices_of_the_node():
    assert matrix_of([ETH0, ETH1, ETH2, LO], [0, 1]) == {
        "cpu:0": Preference(("eth0", "eth2"), ("eth1",)),
        "cpu:1": Preference(("eth1", "eth2"), ("eth0",)),
    }


def test_the_matrix_prefers_what_is_near_a_gpu():
    """Behind its switch, then at its root complex, then on its node, then the rest; of equals the fastest."""
    gpu = Gpu("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0", numa_node=0)
    places = {
        "socket1": ("pci0000:85/0000:85:01.0/0000:86:00.0", 1, 400_000), "unknown": ("", -1, 1_000),
        "complex": ("pci0000:16/0000:16:03.0/0000:1a:00.0", 0, 25_000),
        "slow": ("pci0000:16/0000:16:01.0/0000:17:01.0/0000:19:00.0", 0, 10_000),
        "switch": ("pci0000:16/0000:16:01.0/0000:17:02.0/0000:1b:00.0", 0, 100_000),
    }  # fmt: skip
    devices = [NetworkDevice(name, "", node, speed, pci=pci) for name, (pci, node, speed) in places.items()]
    assert matrix_of(devices, [], [gpu]) == {"gpu:0": Preference(("switch", "slow"), ("complex", "unknown", "socket1"))}
    assert matrix_of(devices[:2], [], [gpu])["gpu:0"] == Preference(("unknown",), ("socket1",))
    assert matrix_of([LO], [], [gpu])["gpu:0"] == Preference((), ())


def test_usable_devices_are_up_with_an_address():
    down, bare = NetworkDevice("down", "10.0.9.1/24", up=False), NetworkDevice("bare")
    assert Topology((ETH0, LO, down, bare)).usable == (ETH0,)


@pytest.mark.parametrize(
    ("hosts", "pairs"),
    [
        (["10.0.1.9", "10.0.0.9"], [("eth0", 1), ("eth1", 0)]),  # by network
        (["fd00::9"], [("eth2", 0)]),
        (["10.0.0.9", "192.168.7.7"], [("eth0", 0)]),  # one is near: the far one is not guessed at
        (["192.168.7.7", "192.168.8.8"], [("eth0", 0), ("eth1", 1), ("eth2", 0)]),  # routed: rails
        (["a.name"], [("eth0", 0), ("eth1", 0), ("eth2", 0)]),
        ([], []),
    ],
)
def test_pairs(hosts: list[str], pairs: list[tuple[str, int]]):
    assert pair([ETH0, ETH1, ETH2], hosts) == pairs


def test_no_device_no_pair():
    assert pair([], ["10.0.0.9"]) == []


def test_a_file_replaces_what_is_discovered(tmp_path: Path):
    topology = Topology((ETH0, ETH1, LO), {"cpu:0": Preference(("eth1",), ("eth0",))})
    file = tmp_path / "topology.json"
    file.write_text(topology.to_json())
    assert load(str(file)) == topology
    assert from_json(json.dumps({"devices": [{"name": "eth9", "numa_node": 1}]})).matrix == {
        "cpu:1": Preference(("eth9",), ())
    }


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"devices": 3}', '{"devices": [{"nme": "x"}]}', '{"devices": [{"name": "x"}, {"name": "x"}]}',
     '{"devices": [{"name": "x", "address": "10.0.0.300/24"}]}', '{"devices": [], "surprise": 1}',
     '{"devices": [], "matrix": {"cpu:0": {"preferred": ["eth7"], "others": []}}}'],
)  # fmt: skip
def test_a_bad_file_says_what_is_wrong(text: str):
    with pytest.raises(ConfigError, match="topology"):
        from_json(text)


def test_a_missing_file():
    with pytest.raises(ConfigError, match="/nowhere"):
        load("/nowhere")


def test_this_machine_has_a_loopback():
    topology = discover()
    (loopback,) = (each for each in topology.devices if each.name == "lo")
    assert loopback.loopback
    assert loopback not in topology.usable
    assert "cpu:0" in topology.matrix


def test_discovery_reads_sys(tmp_path: Path):
    net, nodes = tmp_path / "net", tmp_path / "node"
    for name, files in {"nic9": {"flags": "0x1003", "operstate": "up", "speed": "25000"},
                        "dumb": {"flags": "0x1002", "operstate": "down"}, "masters": {}}.items():  # fmt: skip
        (net / name / "device").mkdir(parents=True)
        for file, text in files.items():
            (net / name / file).write_text(text + "\n")
    (net / "nic9" / "device" / "numa_node").write_text("1\n")
    (nodes / "node0").mkdir(parents=True)
    (nodes / "node1").mkdir()
    topology = discover(net, nodes, tmp_path / "no bus")
    assert topology.devices == (
        NetworkDevice("dumb", up=False),
        NetworkDevice("nic9", numa_node=1, speed_mbit_s=25_000),
    )
    assert topology.matrix["cpu:0"] == Preference(("dumb",), ("nic9",))


def test_discovery_finds_gpus_and_the_way_to_them(tmp_path: Path):
    net, pci, root = tmp_path / "net", tmp_path / "bus", tmp_path / "devices" / "pci0000:16"
    found = {
        "0000:16:01.0/0000:17:00.0": ("0x020000", "0x15b3"), "0000:16:01.0/0000:18:00.0": ("0x030200", "0x10de"),
        "0000:16:02.0": ("0x030000", "0x1a03"), "0000:16:03.0/0000:19:00.0": ("0x120000", "0x1002"),
    }  # fmt: skip
    pci.mkdir()
    for place, (kind, vendor) in found.items():
        folder = root / place
        folder.mkdir(parents=True)
        for file, text in (("class", kind), ("vendor", vendor), ("numa_node", "0")):
            (folder / file).write_text(text + "\n")
        (pci / folder.name).symlink_to(folder)
    virtio = root / "0000:16:01.0/0000:17:00.0/virtio0"
    virtio.mkdir()
    (net / "nic9").mkdir(parents=True)
    (net / "nic9" / "flags").write_text("0x1003")
    (net / "nic9" / "device").symlink_to(virtio)
    topology = discover(net, tmp_path / "node", pci)
    assert topology.devices[0].pci == "pci0000:16/0000:16:01.0/0000:17:00.0"
    assert set(topology.matrix) == {"cpu:0", "gpu:0", "gpu:1"}  # the server's console is none
    assert topology.matrix["gpu:0"] == Preference(("nic9",), ())


def test_the_command_prints_a_file_that_it_reads(tmp_path: Path):
    printed = CliRunner().invoke(COMMAND, ["--json"])
    assert printed.exit_code == 0, printed.output
    assert from_json(printed.output) == discover()
    transports = json.loads(printed.output)["transports"]
    assert set(transports) == {"shm", "tcp", "rdma", "ucx"}
    assert transports["shm"]["works"]
    assert all(each["note"] for each in transports.values())
    assert json.loads(printed.output)["gpu_memory"]["note"]
    file = tmp_path / "topology.json"
    file.write_text(Topology((ETH0, ETH1), matrix_of([ETH0, ETH1], [0])).to_json())
    shown = CliRunner().invoke(COMMAND, ["--file", str(file)])
    assert "eth1    10.0.1.1/24  1     100000  up" in shown.output
    assert "cpu:0  eth0; then eth1" in shown.output


def test_addresses_to_tell_the_near_ones_first():
    topology = Topology((ETH0, LO, ETH1), matrix_of([ETH0, ETH1], [0, 1]))
    assert topology.addresses("cpu:1") == [("eth1", "10.0.1.1"), ("eth0", "10.0.0.1")]
    assert topology.addresses() == [("eth0", "10.0.0.1"), ("eth1", "10.0.1.1")]


def paths_of(topology: Topology, location: str, *hosts: str) -> list[tuple[str, str, int]]:
    endpoints = tuple(Endpoint("tcp", f"{host}:1", f"nic{n}") for n, host in enumerate(hosts))
    config = EngineConfig(topology=topology, location=location, streams_per_peer=1)
    context = ConnectContext(SegmentDescriptor("s", 10, "h", 1, endpoints), NO_SESSION, config)
    remote = RemoteSegment(context, {"tcp": tcp.connect(context)}, ManualClock())
    found = [(path.local_device, path.endpoint.device, path.rank) for path in remote.paths.paths]
    assert len(remote.path_stats()) == len(found)
    remote.close()
    return found


def test_paths_are_ranked_by_the_matrix():
    topology = Topology((ETH0, ETH1), matrix_of([ETH0, ETH1], [0, 1]))
    assert paths_of(topology, "cpu:0", "10.0.0.9", "10.0.1.9") == [("eth0", "nic0", 0), ("eth1", "nic1", 1)]
    assert paths_of(topology, "cpu:1", "10.0.0.9", "10.0.1.9") == [("eth1", "nic1", 0), ("eth0", "nic0", 1)]
    assert paths_of(topology, "", "10.0.0.9", "10.0.1.9") == [("eth0", "nic0", 0), ("eth1", "nic1", 0)]
    assert paths_of(Topology(()), "", "10.0.0.9") == [("", "nic0", 0)]
