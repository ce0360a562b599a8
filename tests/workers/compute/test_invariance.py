"""Batch invariance: a request's tokens and log probabilities are the same bits in whatever way it is served."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tanghulu.errors import ConfigError
from tanghulu.session.sampling import Sampling
from tanghulu.workers.compute.device import CPU, CpuFeatures
from tanghulu.workers.compute.linear import Arithmetic, Linear
from tanghulu.workers.compute.models.layers import Norm, rotate_, silu_in_pieces
from tanghulu.workers.compute.models.model import Model, dtype_name, load_model
from tanghulu.workers.compute.runners import DeviceRunner
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.loading.invariance import require_invariance
from tanghulu.workers.weights import resolve_model
from tests.workers.cpus import each_cpu
from tests.workers.tiny import VOCAB, TinyModel, runner_of, write_tiny
from tests.workers.ways import WAYS, Answer, Served, cpu_runner

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A tiny model with room for two spans of keys."""
    return write_tiny(tmp_path_factory.mktemp("tiny-wide"), max_position_embeddings=512)


def load(tiny: TinyModel, dtype: torch.dtype, cpu: CpuFeatures | None = None) -> Model:
    arithmetic = Arithmetic.of(dtype, CPU, cpu, invariant=True)
    return load_model(resolve_model(str(tiny.path)), dtype, arithmetic=arithmetic)


def prompts(count: int) -> list[tuple[list[int], Sampling]]:
    """Prompts of very different lengths, some alike at first; greedy and drawn in turn."""
    random_ = random.Random(11)
    shared = random_.choices(range(2, VOCAB), k=60)
    made = []
    for index in range(count):
        own = random_.choices(range(2, VOCAB), k=random_.choice((3, 17, 66, 140)))
        sampling = Sampling(
            temperature=index % 2, top_k=20 * (index % 3), top_p=0.9 if index % 4 else 1.0, seed=index, num_logprobs=3
        )
        made.append((shared[: 20 * (index % 3)] + own, sampling))
    return made


@pytest.fixture(scope="module", params=[(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")])
def served(request: pytest.FixtureRequest, wide: TinyModel) -> tuple[Served, list[Answer]]:
    """Requests, and the answer of each that was alone in its worker."""
    dtype, kv_dtype = request.param
    runner = functools.partial(cpu_runner, kv_dtype=kv_dtype)
    served = Served(load(wide, dtype), prompts(7), num_new=11, make_runner=runner)
    return served, served.alone()


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_log_probabilities_are_the_same_bits(served: tuple[Served, list[Answer]], way: str) -> None:
    requests, alone = served
    assert WAYS[way](requests) == alone


def test_on_a_device_too(wide: TinyModel) -> None:
    """The runner for GPUs, on main memory: no static shapes, and each row is sampled alone."""

    def runner(model: Model, block_tokens: int, num_blocks: int) -> ModelRunner:
        return runner_of(DeviceRunner, model, block_tokens=block_tokens, num_blocks=num_blocks)

    served = Served(load(wide, torch.bfloat16), prompts(5), num_new=11, make_runner=runner)
    alone = served.alone()
    for way in ("batched", "moved"):
        assert WAYS[way](served) == alone


ROWS = (1, 2, 3, 7, 14, 15, 16, 17, 33, 64)


def assert_rows_alike(compute: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor) -> None:
    """Each row of ``compute`` is the same bits alone and among others, on one thread and on several."""
    alone = torch.cat([compute(inputs[at : at + 1].clone()) for at in range(len(inputs))])
    threads = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            for count in (count for count in ROWS if count <= len(inputs)):
                for first in (0, 1, len(inputs) - count):
                    own = slice(first, first + count)
                    assert torch.equal(compute(inputs[own].clone()), alone[own]), (num_threads, count, first)
    finally:
        torch.set_num_threads(threads)


@each_cpu
@pytest.mark.parametrize("rounded", [True, False], ids=["few-bits", "more-bits"])
def test_products(cpu: CpuFeatures, rounded: bool) -> None:
    torch.manual_seed(2)
    weight = torch.randn(97, 200)
    product = Linear(
        weight.bfloat16().float() if rounded else weight,
        arithmetic=Arithmetic.of(torch.float32, cpu=cpu, invariant=True),
    )
    inputs = torch.randn(66, 200)
    assert_rows_alike(product, inputs)
    assert torch.allclose(product(inputs), inputs @ (weight.bfloat16().float() if rounded else weight).T, atol=1e-3)


@pytest.mark.parametrize(("rows", "columns"), [(66, 80), (66, 580), (5, 33_000)])
def test_what_lies_between_the_products(rows: int, columns: int) -> None:
    torch.manual_seed(3)
    states = torch.randn(rows, 2 * columns)
    assert_rows_alike(lambda rows: silu_in_pieces(rows.chunk(2, dim=-1)[0]), states)
    assert torch.allclose(silu_in_pieces(states), F.silu(states))
    assert_rows_alike(Norm(torch.randn(2 * columns), 1e-5), states)
    assert_rows_alike(lambda rows: rows.log_softmax(dim=-1), states)


@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_rotation(head_dim: int) -> None:
    """Torch shares 66 rows of 40 heads out to threads."""
    torch.manual_seed(4)

    def rotated(rows: torch.Tensor) -> torch.Tensor:
        states = rows[:, :-2].clone()
        rotate_(states.narrow(1, 0, 40), rows[:, -2:-1], rows[:, -1:])
        return states.flatten(1)

    assert_rows_alike(rotated, torch.randn(66, 48 + 2, head_dim))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_a_worker_tries_its_kernels_at_start(
    wide: TinyModel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(wide, dtype)
    kept_as = dtype_name(dtype)
    named = require_invariance(model, 3, kept_as)
    assert require_invariance(model, 1, kept_as) == named
    assert require_invariance(model, 1, "int8") != named
    norm = model._norm  # type: ignore[attr-defined]
    monkeypatch.setattr(model, "_norm", lambda hidden: norm(hidden) * (1 + len(hidden) * 1e-6))
    with pytest.raises(ConfigError, match="computes other bits in company in 1 chunks on 1 threads"):
        require_invariance(model, 1, kept_as)
