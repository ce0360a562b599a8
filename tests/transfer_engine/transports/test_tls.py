"""The contract over tcp with mutual TLS, and that nothing goes plain."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tanghulu.auth.credentials import NO_TLS, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.errors import NodeUnavailable
from tanghulu.transfer_engine.engine import EngineConfig, Opcode, TransferEngine, TransferRequest
from tanghulu.types import Address
from tests.contracts.transfer import (  # noqa: F401 - those that make no engine of their own
    test_an_empty_batch_is_complete,
    test_asyncio,
    test_bytes_arrive,
    test_cancel_before_waiting,
    test_eight_threads,
    test_every_alignment,
    test_many_ranges_and_both_directions_in_one_batch,
    test_opening_twice_gives_one_segment,
    test_status_moves_a_batch_along,
    test_the_edges_of_the_segment,
)
from tests.tls_files import Authority
from tests.transfer_engine.segment_process import HOST_ID, SegmentProcess, random_bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    return TlsFiles(*authority.sign("host"), authority.ca)


@pytest.fixture(scope="module")
def owner(files: TlsFiles) -> Iterator[SegmentProcess]:
    with SegmentProcess(tls=files) as process:
        yield process


@pytest.fixture
def engine(no_descriptor_leaks: None, files: TlsFiles) -> Iterator[TransferEngine]:
    with TransferEngine(host_id=HOST_ID, config=EngineConfig(tls=files)) as engine:
        yield engine
        engine.check()


@pytest.fixture
def transport() -> str:
    return "tcp"


def test_a_plain_peer_and_one_without_a_certificate_get_nothing(owner: SegmentProcess, files: TlsFiles) -> None:
    for shown in (NO_TLS, TlsFiles(ca=files.ca)):
        config = EngineConfig(tls=shown, connect_timeout_s=0.5)
        with TransferEngine(host_id=HOST_ID, config=config) as engine, pytest.raises(NodeUnavailable):
            write_something(engine, owner)


def write_something(engine: TransferEngine, owner: SegmentProcess) -> None:
    remote = engine.open_segment(owner.descriptor, transport="tcp")
    engine.transfer([TransferRequest(Opcode.WRITE, random_bytes(100), remote, 0, 100)], 1.0)


def test_an_owner_of_another_authority_is_not_believed(owner: SegmentProcess, files: TlsFiles, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    config = EngineConfig(tls=TlsFiles(files.cert, files.key, other.ca))
    with TransferEngine(host_id=HOST_ID, config=config) as engine, pytest.raises(NodeUnavailable, match=r"(?i)certif"):
        engine.open_segment(owner.descriptor, transport="tcp")


def test_the_wire_is_encrypted(owner: SegmentProcess, files: TlsFiles) -> None:
    """What the port speaks is TLS 1.2 or later, and nothing else."""
    (endpoint,) = (each for each in owner.descriptor.endpoints if each.transport == "tcp")
    address = Address.parse(endpoint.address)
    with socket.create_connection((address.host, address.port), timeout=30) as plain:
        with client_context(files).wrap_socket(plain, server_hostname=address.host) as encrypted:
            assert encrypted.version() in ("TLSv1.2", "TLSv1.3")
            assert encrypted.cipher() is not None
