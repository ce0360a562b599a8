"""Tensors: in main memory as they lie, on a GPU through the staging ring (its decisions without any device)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from tanghulu.transfer_engine.engine import Opcode, RemoteSegment, TransferEngine, TransferRequest
from tanghulu.transfer_engine.gpu import staging_plan
from tanghulu.transfer_engine.gpu.staging import GpuStaging, pin
from tanghulu.transfer_engine.gpu.staging_plan import HalfState, StagingEvent, StagingPlan
from tests.transfer_engine.segment_process import SegmentProcess

torch = pytest.importorskip("torch", reason="torch is not installed")
READ, WRITE = Opcode.READ, Opcode.WRITE


class TestPlan:
    def test_the_example(self):
        plan = StagingPlan([150, 80], 100)
        assert [[piece.length for piece in pieces] for pieces in plan.rounds] == [[100], [50, 50], [30]]
        told = [f"{event.value} {half}" for event, half, _ in plan.steps()]
        assert told == [
            "free 0", "fill 0", "free 1", "fill 1", "move 0", "drain 0",
            "free 0", "fill 0", "move 1", "drain 1", "move 0", "drain 0", "free 1", "free 0",
        ]  # fmt: skip

    def test_where_nothing_is_filled_a_round_moves_while_the_one_before_drains(self):
        told = [f"{event.value} {half}" for event, half, _ in StagingPlan([150, 80], 100, fills=False).steps()]
        assert told == [
            "free 0", "fill 0", "move 0", "drain 0", "free 1", "fill 1", "move 1", "drain 1",
            "free 0", "fill 0", "move 0", "drain 0", "free 1", "free 0",
        ]  # fmt: skip

    @given(lengths=st.lists(st.integers(1, 400), max_size=12), half_bytes=st.integers(1, 150), fills=st.booleans())
    def test_every_byte_goes_once_and_no_half_is_used_twice(self, lengths: list[int], half_bytes: int, fills: bool):
        plan = StagingPlan(lengths, half_bytes, fills=fills)
        plan.check()
        moved = [bytearray(length) for length in lengths]
        filling: set[int] = set()
        draining: set[int] = set()
        for event, half, pieces in plan.steps():
            if event is StagingEvent.FREE:
                draining.discard(half)
            elif event is StagingEvent.FILL:
                assert half not in filling | draining
                filling.add(half)
            elif event is StagingEvent.MOVE:
                filling.remove(half)
                for piece in pieces:
                    for at in range(piece.offset, piece.offset + piece.length):
                        moved[piece.request_index][at] += 1
            else:
                draining.add(half)
        assert not filling | draining
        assert all(set(each) == {1} for each in moved)

    def test_every_state_is_reached(self):
        assert set(staging_plan.TRANSITIONS.values()) == set(HalfState)
        assert {event for _, event in staging_plan.TRANSITIONS} == set(StagingEvent)


def test_a_tensor_in_main_memory_is_no_copy(engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
    tensor = torch.arange(1000, dtype=torch.bfloat16).reshape(10, 100)
    engine.transfer([TransferRequest(WRITE, engine.register(tensor), remote, 0, tensor.nbytes)], 5)
    assert owner.peek(0, 2000) == tensor.view(torch.uint8).numpy().tobytes()
    landing = torch.zeros_like(tensor)
    engine.transfer([TransferRequest(READ, landing, remote, 0, tensor.nbytes)], 5)
    assert torch.equal(landing, tensor)
    with pytest.raises(InvalidRequest):
        engine.register(tensor.t())
    with pytest.raises(InvalidRequest, match="GpuStaging"):
        engine.register(torch.empty(5, device="meta"))


class TestStaging:
    @pytest.fixture(params=["cpu", "cuda"])
    def device(self, request: pytest.FixtureRequest) -> str:
        if request.param == "cuda" and not torch.cuda.is_available():
            pytest.skip("hardware: no GPU, torch.cuda.is_available() is False")
        return str(request.param)

    @pytest.mark.parametrize("ring_bytes", [1000, 64 << 20])
    def test_there_and_back(
        self, engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess, device: str, ring_bytes: int
    ):
        staging = GpuStaging(engine, device, ring_bytes=ring_bytes)
        tensors = [torch.randint(0, 1 << 30, (count,), device=device) for count in (1, 700, 333)]
        places = [7, 20_000, 40_000]
        owner.watch_notices(0, 1)
        staging.transfer(
            [
                TransferRequest(WRITE, each, remote, at, each.nbytes, verify=True, notify=b"%d" % at)
                for each, at in zip(tensors, places, strict=True)
            ],
            10,
        )
        assert sorted(data for _, data, _ in owner.take_notices()) == [b"20000", b"40000", b"7"]
        landings = [torch.zeros_like(each) for each in tensors]
        fresh = torch.full((100,), 9, device=device)
        reads = [
            TransferRequest(READ, each, remote, at, each.nbytes) for each, at in zip(landings, places, strict=True)
        ]
        staging.transfer([*reads, TransferRequest(WRITE, fresh, remote, 60_000, fresh.nbytes)], 10)
        assert all(torch.equal(a, b) for a, b in zip(tensors, landings, strict=True))
        assert owner.peek(60_000, 800) == fresh.cpu().numpy().tobytes()

    def test_a_part_of_a_tensor(self, engine: TransferEngine, remote: RemoteSegment, owner: SegmentProcess):
        staging = GpuStaging(engine, "cpu", ring_bytes=64)
        tensor = torch.zeros(100, dtype=torch.uint8)
        owner.poke(0, bytes(range(50)))
        staging.transfer([TransferRequest(READ, tensor, remote, 0, 50, source_offset=25)], 5)
        assert tensor.numpy().tobytes() == bytes(25) + bytes(range(50)) + bytes(25)

    def test_what_cannot_be_staged(self, engine: TransferEngine, remote: RemoteSegment):
        staging = GpuStaging(engine, "cpu", ring_bytes=64)
        tensor = torch.zeros((4, 4), dtype=torch.uint8)
        for bad in (
            TransferRequest(WRITE, b"bytes", remote, 0, 5),
            TransferRequest(WRITE, tensor.t()[1:], remote, 0, 5),
            TransferRequest(WRITE, tensor, remote, 0, 17),
            TransferRequest(READ, tensor, remote, 0, 16, checksum=1),
        ):
            with pytest.raises(InvalidRequest):
                staging.transfer([bad], 1)
        with pytest.raises(DeadlineExceeded):
            staging.transfer([TransferRequest(WRITE, tensor, remote, 0, 16)], 0)
        with pytest.raises(InvalidRequest):
            GpuStaging(engine, "cpu", ring_bytes=1)


def test_a_refused_pinning_leaves_no_error_for_the_next_launch(monkeypatch: pytest.MonkeyPatch):
    """The CUDA runtime keeps the error of a call that is not a launch, and torch raises it behind the next launch."""
    from torch.cuda import _pin_memory_utils

    kept: list[str] = []

    def refuse(address: int, size: int) -> None:
        kept.append("out of memory")
        raise RuntimeError("Registering memory failed with cudaError: 2.")

    def launch(*shape: int, device: str) -> None:
        if kept:
            raise RuntimeError(f"CUDA error: {kept.pop()}")

    monkeypatch.setattr(_pin_memory_utils, "pin_memory", refuse)
    monkeypatch.setattr(torch, "zeros", launch)
    with pytest.raises(NodeUnavailable, match=r"100 bytes cannot be pinned: .*cudaError: 2"):
        pin(memoryview(bytearray(100)))
    torch.zeros(1, device="cuda")
