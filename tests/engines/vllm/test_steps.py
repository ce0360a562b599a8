"""The connector's calls of a step on a GPU, in vLLM's order: without vLLM, whose classes are stand-ins here."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tanghulu.engines.common.requests import LoadJob, SaveJob
from tanghulu.types import Fingerprint
from tests.engines.vllm.test_cache_memory import NUM_BLOCKS, OPTIONS, Rank, WholeBlocks, named

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
CONNECTOR = "tanghulu.engines.vllm.connector"


class Base:
    """What the connector uses of ``KVConnectorBase_V1``."""

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def _get_connector_metadata(self) -> Any:
        return self._metadata


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The connector's module over stand-ins, which are gone afterwards."""
    parts = BASE.split(".")
    for name in (*(".".join(parts[:count]) for count in range(1, len(parts) + 1)), "vllm.logger"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, value in {"KVConnectorBase_V1": Base, "KVConnectorRole": SimpleNamespace()}.items():
        monkeypatch.setattr(sys.modules[BASE], name, value, raising=False)
    for name in ("KVConnectorMetadata", "KVConnectorWorkerMetadata"):
        monkeypatch.setattr(sys.modules[BASE], name, type(name, (), {}), raising=False)
    logger = SimpleNamespace(info=lambda *args: None)
    monkeypatch.setattr(sys.modules["vllm.logger"], "init_logger", lambda name: logger, raising=False)
    monkeypatch.delitem(sys.modules, CONNECTOR, raising=False)
    yield importlib.import_module(CONNECTOR)
    del sys.modules[CONNECTOR]


@pytest.fixture
def device() -> Rank:
    return Rank("LBNHC", WholeBlocks())


@pytest.fixture
def connector(module: Any, device: Rank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(module, "memory_of", lambda *args: device.memory)
    made = module.TanghuluConnector.__new__(module.TanghuluConnector)
    made.rank = made._side = module.RankSide(0, NUM_BLOCKS, OPTIONS, Fingerprint(b"0" * 16), device.store)
    made.register_kv_caches(device.layers)
    yield made
    made.shutdown()
    device.transfers.close()


def collect(connector: Any, orders: Any, until: str) -> None:
    """Make steps without work until something has ended."""
    orders.idle = True
    while not getattr(connector.rank.ended, until):
        connector.bind_connector_metadata(orders)
        connector.get_finished(set())


def test_a_save_waits_for_the_step_that_computes_it(module: Any, connector: Any, device: Rank):
    connector.bind_connector_metadata(module.StepOrders(saves=[SaveJob(0, named(2))]))
    device.stream.launch(lambda: device.fill(2, 7))
    connector.start_load_kv(None)
    connector.wait_for_save()
    collect(connector, module.StepOrders(), "saved")
    (saved,) = device.store._client.chunks.values()
    assert saved == device.bytes_of(2)
    assert all((layer[2] == 7).all() for layer in device.layers.values())
    assert connector.build_connector_worker_meta().jobs == {0: 1}


def test_a_load_waits_for_the_steps_before_its_own(module: Any, connector: Any, device: Rank):
    wanted = device.bytes_of(2)
    connector.bind_connector_metadata(module.StepOrders(saves=[SaveJob(0, named(2))]))
    connector.wait_for_save()
    collect(connector, module.StepOrders(), "saved")
    ran: list[str] = []
    device.stream.launch(lambda: (device.fill(5, 0), ran.append("the step before, and zeroing")))
    connector.bind_connector_metadata(module.StepOrders(loads=[LoadJob("r", named(5))]))
    device.stream.launch(lambda: ran.append("this step"))
    connector.start_load_kv(None)
    connector.wait_for_save()
    collect(connector, module.StepOrders(), "loaded")
    assert connector.rank.ended.loaded == {"r"}
    assert connector.get_block_ids_with_load_errors() == set()
    assert ran == ["the step before, and zeroing"]
    assert device.bytes_of(5) == wanted
