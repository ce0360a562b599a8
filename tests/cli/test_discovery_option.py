"""--discovery: what it names, and that it names itself when it is wrong."""

import pytest

from tanghulu.discovery.base import Instance
from tanghulu.discovery.entering import enter
from tanghulu.discovery.etcd import EtcdDiscovery
from tanghulu.discovery.file import FileDiscovery
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.discovery.open import NoDiscovery, instances_now, open_discovery
from tanghulu.errors import ConfigError, InvalidRequest
from tanghulu.types import Address, InstanceId, Role

MASTER = Address("127.0.0.1", 1)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("master", MasterDiscovery),
        ("", MasterDiscovery),
        ("etcd://127.0.0.1:2379", EtcdDiscovery),
        ("file:/tmp/x", FileDiscovery),
        ("none", NoDiscovery),
    ],
)
async def test_each_spec_opens_its_kind(spec, kind):
    async with open_discovery(spec, MASTER) as discovery:
        assert type(discovery) is kind


@pytest.mark.parametrize("spec", ["zookeeper://x:1", "etcd:x", "file:"])
async def test_another_spec_refuses_to_start(spec):
    with pytest.raises(ConfigError, match="--discovery"):
        open_discovery(spec, MASTER)


async def test_a_bad_address_names_itself():
    with pytest.raises(InvalidRequest, match="nowhere"):
        open_discovery("etcd://nowhere", MASTER)


async def test_a_process_without_others_registers_and_finds_nobody():
    instance = Instance(InstanceId("conductor-8000-1"), Role.CONDUCTOR, MASTER)
    async with open_discovery("none", MASTER) as discovery:
        registration = await enter(discovery, instance)
        await registration.update(instance)
        await registration.close()
    assert await instances_now("none", MASTER, namespace="default", deadline_s=5) == []
