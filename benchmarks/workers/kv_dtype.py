"""What ``--kv-dtype`` loses, gains and costs: one model over caches of each type, in one process.

    python -m benchmarks.workers.kv_dtype [--model smollm2] [--tokens 1024] [--text FILE] [--threads 1] [--rounds 5]

*Loss*: the log probabilities that the model gives the tokens of a text, each behind those before it, and its likeliest
token there; the cache is all that differs between two arms of one type of weights. *Gain*: bytes of a token's KV.
*Cost*: decode steps of 1 and of 8 sequences and a prompt of 1,024 tokens in chunks of 512, in turns; the least CPU time
of each is shown, which other work on the machine disturbs least.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from tanghulu.workers.compute.forward_batch import SequenceChunk
from tanghulu.workers.compute.kv_cache import KvCache, to_rows
from tanghulu.workers.compute.lanes import LanedForward
from tanghulu.workers.compute.models.model import Model, load_model, pick_dtype
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import resolve_model
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets

BLOCK_TOKENS, PROMPT, CHUNK = 64, 1024, 512
TEXT = Path(__file__).parents[2] / "docs/transfer_engine.md"
#: Types of weights, and of KV beside each.
ARMS = {"float32": ("float32", "bfloat16", "int8"), "bfloat16": ("bfloat16", "int8")}


def chunk(tokens: Sequence[int], sequence: int, start: int, end: int, num_more_logits: int = 0) -> SequenceChunk:
    blocks = range(sequence * PROMPT // BLOCK_TOKENS, (sequence + 1) * PROMPT // BLOCK_TOKENS)
    return SequenceChunk(tokens[start:end], start, blocks, wants_logits=True, num_more_logits=num_more_logits)


def cache_of(model: Model, kv_dtype: str, sequences: int) -> KvCache:
    return KvCache(KvLayout.of(model.config, BLOCK_TOKENS, kv_dtype), sequences * PROMPT // BLOCK_TOKENS)


def read(model: Model, kv_dtype: str, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The log probability of every token but the first, and the likeliest token in its place."""
    forward, parts = LanedForward(model, cache_of(model, kv_dtype, 1)), []
    for start in range(0, len(tokens), CHUNK):
        end = min(start + CHUNK, len(tokens))
        parts.append(forward([chunk(tokens, 0, start, end, end - start - 1)]).log_softmax(dim=-1))
    logprobs = torch.cat(parts)[:-1]
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0], logprobs.argmax(dim=-1)


def show_loss(models: dict[str, Model], tokens: list[int], console: Console) -> None:
    found = {(of, kv): read(models[of], kv, tokens) for of, kinds in ARMS.items() for kv in kinds}
    table = Table("weights, KV", "beside", "mean |difference|", "largest", "mean difference", "same greedy tokens")
    for (beside, one), (arm, other) in itertools.combinations(found.items(), 2):
        if beside[0] != arm[0] and beside[1] != "float32":
            continue
        difference = other[0] - one[0]
        figures = (difference.abs().mean(), difference.abs().max(), difference.mean())
        same = float((one[1] == other[1]).float().mean())
        table.add_row(", ".join(arm), ", ".join(beside), *(f"{float(each):.4f}" for each in figures), f"{same:.1%}")
    console.print(f"Log probabilities of {len(tokens) - 1} tokens (natural logarithms):", table)


def show_cost(model: Model, kinds: Sequence[str], rounds: int, console: Console) -> None:
    tokens = [(7 * at) % 1000 for at in range(PROMPT)]
    forwards = {}
    for kv in kinds:
        cache = cache_of(model, kv, 8)
        cache.rows.copy_(to_rows(torch.randn(*cache.rows.shape[:2], cache.layout.head_dim), cache.rows.dtype))
        forwards[kv] = LanedForward(model, cache)
    steps = {"prefill 1 x 1,024": [[chunk(tokens, 0, at, at + CHUNK)] for at in range(0, PROMPT, CHUNK)]}
    for count, context in itertools.product((1, 8), (256, 1023)):
        name = f"decode {count} behind {context:,}"
        steps[name] = [[chunk(tokens, index, context, context + 1) for index in range(count)]]
    table = Table("CPU ms a step", *kinds, "ratio of the last to the first")
    for name, run in steps.items():
        times: dict[str, list[float]] = {kv: [] for kv in kinds}
        for _ in range(rounds if len(run) > 1 else 5 * rounds):
            for kv, forward in forwards.items():
                started = time.process_time()
                for chunks in run:
                    forward(chunks)
                times[kv].append(time.process_time() - started)
        least = [min(times[kv]) for kv in kinds]
        table.add_row(name, *(f"{each * 1e3:.1f}" for each in least), f"{least[-1] / least[0]:.2f}")
    console.print(table)


@click.command()
@click.option("--model", default="smollm2")
@click.option("--text", type=click.Path(exists=True, path_type=Path), default=TEXT)
@click.option("--tokens", "num_tokens", default=PROMPT)
@click.option("--threads", default=1)
@click.option("--rounds", default=5)
def main(model: str, text: Path, num_tokens: int, threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    source, console = resolve_model(model), Console()
    tokenizer = Tokenizer.from_buffer(load_tokenizer_assets(source).tokenizer_json)
    tokens = tokenizer.encode(text.read_text(encoding="utf-8")).ids[: min(num_tokens, PROMPT)]
    models = {name: load_model(source, pick_dtype(name)) for name in ARMS}
    for kv in ARMS["float32"]:
        layout = KvLayout.of(source.config, BLOCK_TOKENS, kv)
        console.print(f"KV in {kv}: {layout.block_bytes / BLOCK_TOKENS:,.0f} bytes a token")
    show_loss(models, tokens, console)
    show_cost(models["bfloat16"], ARMS["bfloat16"], rounds, console)


if __name__ == "__main__":
    main()
