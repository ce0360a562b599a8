"""``tanghulu bench``: measure a running cluster, its HTTP API or its store, from the machine that runs the command."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
import httpx
import numpy as np

from tanghulu.cli.printing import print_rows, store_options
from tanghulu.conductor.replay.live import SeenAnswer, find_target
from tanghulu.errors import StoreFull
from tanghulu.masters import Masters
from tanghulu.runtime.config import PREFIX, FiniteRange
from tanghulu.runtime.master_options import TLS_CA_HELP, HttpClientOptions
from tanghulu.store.client import Client, connect
from tanghulu.types import format_size, parse_size, parse_url

_TIMEOUT = httpx.Timeout(600, connect=10, pool=None)


@click.group("bench", short_help="Measure a running cluster.")
def COMMAND() -> None:
    """Measure a running cluster: its HTTP API with concurrent streams, or its store with one client.

    Neither leaves anything behind: chunks are removed, and each run has its own prompts. The figures hold for this
    machine and its other load.
    """


@dataclass(frozen=True, slots=True)
class HttpFigures:
    """Figures of one run: times in seconds; ``gap`` is between two tokens of one answer."""

    num_requests: int
    num_failed: int
    seconds: float
    requests_per_s: float
    tokens_per_s: float
    cached_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float


@dataclass(frozen=True, kw_only=True)
class StreamLoad:
    """``concurrency`` streams at a time, ``num_requests`` in all; ``shared``: the fraction common to all prompts."""

    num_requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    shared: float
    seed: int


def prompts(load: StreamLoad, vocabulary: Sequence[int], run: int) -> list[list[int]]:
    """Return the token ids of each prompt. Prompts of different ``run`` differ from their first token on."""
    draw = np.random.default_rng((load.seed, run))
    num_shared = int(load.prompt_tokens * load.shared)
    ids = np.array(vocabulary, dtype=np.uint32)
    common = ids[draw.integers(len(ids), size=num_shared)]
    rest = ids[draw.integers(len(ids), size=(load.num_requests, load.prompt_tokens - num_shared))]
    return [np.concatenate((common, own)).tolist() for own in rest]


@COMMAND.command("http")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="the conductor")
@click.option(
    "--requests", type=click.IntRange(1, 1_000_000), default=64, show_default=True, help="total number of requests"
)
@click.option("--concurrency", type=click.IntRange(1, 4096), default=8, show_default=True, help="streams at a time")
@click.option("--prompt-tokens", type=click.IntRange(1, 1_000_000), default=256, show_default=True)
@click.option("--output-tokens", type=click.IntRange(2, 1_000_000), default=32, show_default=True)
@click.option(
    "--shared",
    type=FiniteRange(0, 1),
    default=0.9,
    show_default=True,
    help="share of each prompt that all have in common",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True)
@click.option("--api-key", default="", envvar=PREFIX + "API_KEY", help="API key for a conductor with --api-keys")
@click.option("--tls-ca", default="", envvar=PREFIX + "TLS_CA", metavar="FILE", help=TLS_CA_HELP)
@click.option("--json", "as_json", is_flag=True, help="print JSON for programs")
def http(url: str, requests: int, api_key: str, tls_ca: str, as_json: bool, **load_options: Any) -> None:
    """Send concurrent streamed completions and report times to tokens, and throughput."""
    load = StreamLoad(num_requests=requests, **load_options)
    figures = asyncio.run(measure_http(url, load, HttpClientOptions(api_key=api_key, tls_ca=tls_ca)))
    value = asdict(figures)
    lines = [(name.replace("_", " "), f"{number:.4g}") for name, number in value.items()]
    print_rows(as_json, value, (), lines)
    if figures.num_failed:
        raise click.exceptions.Exit(1)


async def measure_http(url: str, load: StreamLoad, client: HttpClientOptions) -> HttpFigures:
    """Run ``load`` against the conductor at ``url``. Raises NodeUnavailable if no model answers there."""
    async with httpx.AsyncClient(
        base_url=parse_url(url, path=True),
        timeout=_TIMEOUT,
        limits=httpx.Limits(max_connections=load.concurrency),
        trust_env=False,
        headers=client.shown,
        verify=client.verified_by,
    ) as http:
        target = await find_target(http, url)
        waiting = iter(prompts(load, target.vocabulary, uuid.uuid4().int))
        ended = list[_Stream]()
        start_s = time.perf_counter()

        async def one_after_another() -> None:
            for tokens in waiting:
                ended.append(await _stream(http, target.model, tokens, load))

        async with asyncio.TaskGroup() as group:
            for _ in range(load.concurrency):
                group.create_task(one_after_another())
        return _figures(ended, time.perf_counter() - start_s)


@dataclass(frozen=True, slots=True)
class _Stream:
    begun_s: float
    seen: SeenAnswer | None


async def _stream(http: httpx.AsyncClient, model: str, tokens: list[int], load: StreamLoad) -> _Stream:
    body = {
        "model": model,
        "prompt": tokens,
        "max_tokens": load.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begun_s, seen = asyncio.get_running_loop().time(), SeenAnswer()
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            await seen.read(response)
    except (httpx.HTTPError, ValueError):
        return _Stream(begun_s, None)
    return _Stream(begun_s, seen if seen.is_whole else None)


def _figures(ended: Sequence[_Stream], seconds: float) -> HttpFigures:
    whole = [(each.begun_s, each.seen) for each in ended if each.seen is not None]
    usages = [seen.usage for _, seen in whole]
    ttft = [seen.times_s[0] - begun_s for begun_s, seen in whole]
    gaps = [later - sooner for _, seen in whole for sooner, later in itertools.pairwise(seen.times_s)]
    num_prompt = sum(usage["prompt_tokens"] for usage in usages)
    cached = sum((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for usage in usages)
    return HttpFigures(
        len(ended),
        len(ended) - len(whole),
        seconds,
        len(whole) / seconds,
        sum(usage["completion_tokens"] for usage in usages) / seconds,
        cached / max(num_prompt, 1),
        *(_percentile(ttft, share) for share in (50, 99)),
        *(_percentile(gaps, share) for share in (50, 99, 100)),
    )


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Figures of one operation on chunks of one size."""

    operation: str
    num_bytes: int
    num_calls: int
    p50_us: float
    p99_us: float
    gb_per_s: float


@COMMAND.command("store")
@click.option("--size", "sizes", multiple=True, default=("4KiB", "64KiB", "1MiB", "16MiB"), show_default=True)
@click.option("--seconds", type=FiniteRange(0.01, 3600), default=1.0, show_default=True, help="seconds per measurement")
@store_options
def store(sizes: Sequence[str], seconds: float, master: Masters, as_json: bool) -> None:
    """Put, find, get and remove chunks of several sizes, one call at a time."""
    rows = list[StoreFigures]()
    try:
        with connect(master) as client:
            for num_bytes in map(parse_size, sizes):
                rows += measure_store(client, num_bytes, seconds)
    finally:
        if rows or as_json:
            _show(rows, as_json)


def _show(rows: Sequence[StoreFigures], as_json: bool) -> None:
    columns = ("operation", "size", "calls", "p50 us", "p99 us", "GB/s")
    cells = (
        (r.operation, format_size(r.num_bytes), r.num_calls, f"{r.p50_us:.1f}", f"{r.p99_us:.1f}", f"{r.gb_per_s:.2f}")
        for r in rows
    )
    print_rows(as_json, [asdict(row) for row in rows], columns, cells)


#: Chunks that one measurement keeps in the store at a time; fewer if a node's memory cannot hold twice as many.
_KEPT = 16


def _num_kept(client: Client, num_bytes: int) -> int:
    """Return the number of chunks to keep; raises StoreFull if no node can hold one."""
    capacities = [node.capacity_bytes for node in client.nodes()]
    if num_bytes > max(capacities, default=num_bytes):
        raise StoreFull(f"--size {format_size(num_bytes)} exceeds the largest node, {format_size(max(capacities))}")
    return max(1, min(_KEPT, min(capacities, default=0) // 2 // max(1, num_bytes)))


def measure_store(client: Client, num_bytes: int, seconds: float) -> list[StoreFigures]:
    """Measure put, exists, get and remove, each for about ``seconds``. The chunks are removed in any case."""
    num_kept = _num_kept(client, num_bytes)
    payload, prefix = os.urandom(num_bytes), f"bench/{uuid.uuid4().hex}"
    keys = [f"{prefix}/{number}" for number in range(num_kept)]

    def put(number: int) -> None:
        client.put(keys[number % num_kept], payload)

    def get(number: int) -> None:
        with client.get(keys[number % num_kept]) as chunk:
            assert len(chunk) == num_bytes

    def remove(number: int) -> None:
        client.remove(keys[number % num_kept])

    try:
        puts = _timed(put, seconds, before=remove)
        for number in range(num_kept):
            put(number)
        finds = _timed(lambda number: client.exists(keys[number % num_kept]), seconds)
        gets = _timed(get, seconds)
        removals = _timed(remove, seconds, before=put)
    finally:
        client.remove_many(keys)
    timed = {"put": puts, "exists": finds, "get": gets, "remove": removals}
    return [_store_row(operation, num_bytes, times) for operation, times in timed.items()]


def _timed(call: Callable[[int], object], seconds: float, before: Callable[[int], object] | None = None) -> list[float]:
    """Return the seconds of each of ``call(0)``, ``call(1)``, ...; ``before`` is not counted."""
    times = list[float]()
    until = time.perf_counter() + seconds
    for number in itertools.count():
        if before is not None:
            before(number)
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
        if time.perf_counter() > until:
            return times
    raise AssertionError("counting does not end")


def _store_row(operation: str, num_bytes: int, times: Sequence[float]) -> StoreFigures:
    median = _percentile(times, 50)
    moved = num_bytes if operation in ("put", "get") else 0
    return StoreFigures(
        operation, num_bytes, len(times), median * 1e6, _percentile(times, 99) * 1e6, moved / median / 1e9
    )
