"""The price of ``--batch-invariant``: steps of a model with and without it, in turns, in one process.

    python -m benchmarks.workers.invariance [--model smollm2] [--dtype bfloat16] [--threads 1] [--rounds 5]

A decode step of 1 and of 8 sequences with 256 tokens each, and a prompt of 1,024 tokens in chunks of 512. Of each the
least CPU time is shown: what else runs on the machine disturbs that least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import click
import torch
from rich.console import Console
from rich.table import Table

from tanghulu.workers.compute.forward_batch import SequenceChunk
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.lanes import LanedForward
from tanghulu.workers.compute.linear import Arithmetic
from tanghulu.workers.compute.models.model import dtype_name, load_model, pick_dtype
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model

BLOCK_TOKENS, CONTEXT, PROMPT, CHUNK = 64, 256, 1024, 512
Step = tuple[Sequence[SequenceChunk], ...]


def chunk(sequence: int, start: int, end: int) -> SequenceChunk:
    blocks = range(sequence * PROMPT // BLOCK_TOKENS, (sequence + 1) * PROMPT // BLOCK_TOKENS)
    return SequenceChunk([(7 * at + sequence) % 1000 for at in range(start, end)], start, blocks, wants_logits=True)


#: What is measured: the steps of it, and how many tokens they compute.
KINDS: dict[str, tuple[Step, int]] = {
    "decode 1": (([chunk(0, CONTEXT, CONTEXT + 1)],), 1),
    "decode 8": (([chunk(index, CONTEXT, CONTEXT + 1) for index in range(8)],), 8),
    "prefill 1 x 1,024": (tuple([chunk(0, at, at + CHUNK)] for at in range(0, PROMPT, CHUNK)), PROMPT),
}


def cpu_s(forward: Callable[[Sequence[SequenceChunk]], torch.Tensor], steps: Step) -> float:
    started = time.process_time()
    for chunks in steps:
        forward(chunks)
    return time.process_time() - started


@click.command()
@click.option("--model", default="smollm2")
@click.option("--dtype", default="bfloat16")
@click.option("--threads", default=1)
@click.option("--rounds", default=5)
def main(model: str, dtype: str, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    source, kind = resolve_model(model), pick_dtype(dtype)
    cache = KvCache(KvLayout.of(source.config, BLOCK_TOKENS, dtype_name(kind)), 8 * PROMPT // BLOCK_TOKENS)
    forwards = {
        invariant: LanedForward(load_model(source, kind, arithmetic=Arithmetic.of(kind, invariant=invariant)), cache)
        for invariant in (False, True)
    }
    table = Table(f"{dtype}: CPU ms a token (tokens/s of CPU)", "without", "with", "ratio")
    for what, (steps, num_tokens) in KINDS.items():
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds if num_tokens > 8 else 5 * rounds):
            for invariant, forward in forwards.items():
                times[invariant].append(cpu_s(forward, steps) / num_tokens)
        off, on = min(times[False]), min(times[True])
        table.add_row(what, *(f"{each * 1e3:.2f} ({1 / each:.0f})" for each in (off, on)), f"{on / off:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
