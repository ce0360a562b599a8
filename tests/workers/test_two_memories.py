"""Two whole workers, one with its cache in the segment and one with it on a device, read each other's prefixes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tanghulu.runtime.process import Process
from tanghulu.types import Fingerprint, Role
from tanghulu.workers.assembly import WorkerServer
from tanghulu.workers.compute.device import CPU
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.compute.runners import DeviceRunner, TorchRunner
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.thread import StepReport
from tanghulu.workers.kv import staging as kv_staging
from tanghulu.workers.kv.device_sharing import DeviceSharing
from tanghulu.workers.kv.staging import DeviceStaging
from tanghulu.workers.loading.loaded_model import LoadedModel
from tanghulu.workers.mock.loading import byte_level
from tests.workers.peers import prefix_at
from tests.workers.rig import PROMPT
from tests.workers.shared_memory import LocalIpc
from tests.workers.tiny import BLOCK, request, runner_of

NUM_BLOCKS = 32
NAME = Fingerprint(b"0123456789abcdef")


class NoStatus:
    def send(self, event: str, **more: object) -> None:
        pass


class Watched(WorkerServer):
    """A worker whose reports can be awaited."""

    def __init__(self, process: Process, loaded: LoadedModel) -> None:
        super().__init__(process, loaded)
        self.reports: asyncio.Queue[StepReport] = asyncio.Queue()

    def _spread(self, reports: Sequence[StepReport]) -> None:
        super()._spread(reports)
        for report in reports:
            self.reports.put_nowait(report)

    async def text(self, name: str, prompt: list[int], **more: object) -> tuple[list[int], int]:
        """(tokens, tokens that were found) of a request."""
        made, tokens = request(name, prompt, 4, **more), list[int]()  # type: ignore[arg-type]
        self._thread.post(lambda core: core.add(made))
        while True:
            report = await asyncio.wait_for(self.reports.get(), 20)
            for output in report.result.outputs:
                tokens += output.tokens
                if output.finish is not None:
                    return tokens, output.cached_tokens


@contextlib.asynccontextmanager
async def serving(model: Model, run_dir: Path, on_device: bool, kv_dtype: str) -> AsyncIterator[Watched]:
    layout = KvLayout.of(model.config, BLOCK, kv_dtype)
    staging = DeviceStaging(layout, CPU, 16 * layout.block_bytes) if on_device else None

    def make_runner(buffer: memoryview) -> ModelRunner:
        if staging is not None:
            return runner_of(DeviceRunner, model, block_tokens=BLOCK, kv_dtype=kv_dtype, num_blocks=NUM_BLOCKS)
        return runner_of(
            TorchRunner, model, block_tokens=BLOCK, kv_dtype=kv_dtype, kv_capacity_bytes=buffer.nbytes, buffer=buffer
        )

    config = WorkerConfig(port=0, kv_memory=NUM_BLOCKS * layout.block_bytes, block_tokens=BLOCK, store=False)
    process = Process(Role.BOTH, config, run_dir, NoStatus(), CollectorRegistry(), "", 7 + on_device)  # type: ignore[arg-type]
    loaded = LoadedModel(
        config.for_device(on_gpu=False), "tiny", layout, NAME, byte_level(), make_runner, None, staging
    )
    async with Watched(process, loaded) as worker:
        yield worker


async def test_a_prefix_moves_from_one_device_to_another(
    tiny_model: Model, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a slot of pinned memory, in place."""
    monkeypatch.setattr(kv_staging, "make_sharing", lambda blocks: DeviceSharing(blocks.parts[0], LocalIpc()))
    monkeypatch.setattr(kv_staging.StagedWindow, "take", None)
    prompt = (PROMPT * 4)[: 17 * BLOCK + 3]
    async with (
        serving(tiny_model, folders[0], True, "float32") as first,
        serving(tiny_model, folders[1], True, "float32") as second,
    ):
        text, cached = await first.text("one", prompt)
        assert cached == 0
        holder = prefix_at(f"{first.address}|{first.unix_path}", 17)
        assert await second.text("two", prompt, holder=holder) == (text, 17 * BLOCK)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for folder in made:
        folder.mkdir()
    return made


@pytest.mark.parametrize(("from_device", "kv_dtype"), [(True, "float32"), (False, "float32"), (True, "int8")])
async def test_a_prefix_moves_between_memories(
    tiny_model: Model, folders: list[Path], from_device: bool, kv_dtype: str
):
    """17 blocks, while the device's worker shows 8 at a time and takes in 1 at a time."""
    prompt = (PROMPT * 4)[: 17 * BLOCK + 3]
    async with (
        serving(tiny_model, folders[0], from_device, kv_dtype) as first,
        serving(tiny_model, folders[1], not from_device, kv_dtype) as second,
    ):
        text, cached = await first.text("one", prompt)
        assert cached == 0
        holder = prefix_at(f"{first.address}|{first.unix_path}", 17)
        assert await second.text("two", prompt, holder=holder) == (text, 17 * BLOCK)
