"""``tanghulu replay TRACE…``: compare policies on real traces, in virtual time or on a running conductor (--live)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from tanghulu.conductor.replay.live import LiveConfig, replay_live
from tanghulu.conductor.replay.model import LatencyModel
from tanghulu.conductor.replay.plot import check_plot, write_plot
from tanghulu.conductor.replay.report import ReplayReport, deviation, make_report, table
from tanghulu.conductor.replay.simulation import ClusterConfig, make_simulation
from tanghulu.conductor.replay.trace import TraceRequest, read_trace
from tanghulu.conductor.routing.policies.registry import POLICY_NAMES, PolicyOptions, make_policy
from tanghulu.errors import ConfigError
from tanghulu.runtime.config import check_bounds, command, option
from tanghulu.runtime.master_options import HttpClientOptions
from tanghulu.types import parse_url

#: Fewest columns for the table, also where the output is not a terminal.
_LEAST_WIDTH = 124
#: Exit code after Ctrl-C, as in shells.
_INTERRUPTED = 130
_ORDERS = ("fcfs", "sjf")
#: Options that apply to a running conductor; all others describe the simulated cluster and its policies.
_LIVE = (
    "traces",
    "live",
    "scale",
    "connections",
    "policy",
    "speedup",
    "warmup",
    "seed",
    "limit",
    "ttft_slo",
    "tbt_slo",
)
_LIVE_OUTPUT = ("plot", "json")
_ONLY_LIVE = ("scale", "connections", "compare")
_ONLY_PAIRS = ("prefill", "decode", "order", "ageing", "t0")
_ONLY_WHOLE = ("chunk_tokens", "speeds")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(HttpClientOptions):
    """A trace, and the cluster on which it is replayed. Constants of the model: see ``model.LatencyModel``."""

    traces: tuple[Path, ...] = ()
    policy: str = option("", "policies to compare, separated by commas; default: ttft-min, live the conductor's own")
    prefill: int = option(8, "number of prefill workers", least=1, most=4096)
    decode: int = option(8, "number of decode workers", least=1, most=4096)
    workers: int = option(
        0, "number of workers that both prefill and decode, in place of --prefill and --decode", least=0, most=4096
    )
    speeds: str = option("", "relative speeds of the first of --workers, separated by commas; the others have 1")
    speedup: float = option(1.6, "speedup of the arrival of requests", above=0)
    blocks: int = option(
        5859, "the trace's blocks, of 512 tokens by default, in the cache of one prefill worker", least=1
    )
    ssd_blocks: int = option(0, "the trace's blocks on an SSD behind each of these caches", least=0, most=1 << 40)
    warmup: str = option("0.5", "share of the time span, or a trace, replayed first for warm-up")
    noise: float = option(0.0, "sigma of the lognormal factor between expected and real prefill time", least=0, most=10)
    seed: int = option(0, "random seed")
    limit: int = option(0, "limit on replayed requests; 0 replays all", least=0)
    fetch: bool = option(True, "workers can fetch prefixes from each other")
    in_flight: bool = option(True, "also match blocks that are still being computed")
    shared_cache: bool = option(False, "simulate an ideal pool: one shared cache at no cost")
    order: str = option(
        "fcfs", "order of a worker's queue: first come first served, or shortest first with ageing", choices=_ORDERS
    )
    ageing: float = option(0.1, "sjf: seconds by which each second of waiting shortens a prefill's rank", least=0)
    hot_prefix_rate: float = option(
        0.0,
        "fetches per second and holder above which a prefix is copied to more workers; 0 disables it",
        least=0,
    )
    reject: bool = option(False, "reject requests that would miss an SLO")
    ttft_slo: float = option(5.0, "SLO on the time to the first token, in seconds", least=0)
    tbt_slo: float = option(0.1, "SLO on the time between tokens, in seconds", least=0)
    replica_weight: float = option(1.0, "ttft-min: cost of copying a prefix, as a multiple of its benefit", least=0)
    load_weight: float = option(6.0, "ttft-min: cost of computation to later requests, as a multiple of it", least=0)
    balance_threshold: float = option(
        1.5, "mooncake: factor by which a remote prefix must be longer to be fetched", above=0
    )
    overlap_weight: float = option(1.0, "dynamo: weight of prefill blocks against active blocks")
    temperature: float = option(0.0, "dynamo: above 0, draw a worker by softmax over the costs", least=0)
    alpha: float = option(0.5, "linear: weight of the hit share")
    beta: float = option(0.5, "linear: weight of the free share of the queue")
    gamma: float = option(0.05, "linear: weight of proximity")
    patience_s: float = option(2.0, "session affinity: acceptable extra wait at the session's worker")
    layers: int = option(80, "model: layers", least=1, most=10_000)
    dim: int = option(8192, "model: width", least=1, most=1 << 20)
    gqa: int = option(8, "model: query heads for each key-value head", least=1, most=10_000)
    gflops: float = option(8 * 312e12, "worker: peak FLOP/s", above=0, most=1e21)
    mfu: float = option(0.5, "worker: share of the peak that prefill reaches", above=0, most=1)
    t0: float = option(0.02, "worker: fixed part of a prefill, in seconds", least=0, most=3600)
    h2d: float = option(128e9, "worker: loading KV to the GPU, in bytes/s", above=0, most=1e18)
    ssd: float = option(5e9, "worker: reading KV from an SSD, in bytes/s", above=0, most=1e18)
    nic: float = option(70e9, "worker: network, in bytes/s", above=0, most=1e18)
    c: float = option(0.020, "worker: fixed part of a decode step, in seconds", above=0, most=3600)
    d: float = option(1e-4, "worker: cost of a sequence in a decode step, in seconds", least=0, most=3600)
    e: float = option(2.9e-8, "worker: cost of a token of context in a decode step, in seconds", least=0, most=3600)
    kv_tokens: float = option(1.4e6, "worker: limit on tokens of context for decoding", above=0, most=1e12)
    max_batch: int = option(512, "worker: limit on sequences in a decode step", least=1)
    chunk_tokens: int = option(512, "worker of both phases: limit on tokens in a step", least=1)
    json: bool = option(False, "print one JSON object a line instead of a table")

    def __post_init__(self) -> None:
        for name in self.policies if self.policy else ():
            if name not in POLICY_NAMES:
                raise ConfigError(f"--policy {name!r} is unknown; known: {', '.join(POLICY_NAMES)}")
        check_bounds(self)
        self._refuse_pointless()
        _ = self.worker_speeds

    @property
    def policies(self) -> tuple[str, ...]:
        """Names given in --policy, or its default."""
        return tuple(name.strip() for name in (self.policy or "ttft-min").split(","))

    @property
    def changed(self) -> set[str]:
        """Names of the options that do not have their defaults."""
        return {f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}

    def _refuse_pointless(self) -> None:
        if self.workers:
            self._refuse(_ONLY_PAIRS, "means nothing with --workers")
        else:
            self._refuse(_ONLY_WHOLE, "needs --workers N")

    def _refuse(self, names: Iterable[str], why: str) -> None:
        for name in sorted(self.changed & set(names)):
            raise ConfigError(f"--{name.replace('_', '-')} {why}")

    @property
    def worker_speeds(self) -> tuple[float, ...]:
        """The values of --speeds."""
        try:
            speeds = tuple(map(float, filter(None, self.speeds.split(","))))
        except ValueError:
            speeds = (0.0,)
        if not all(0 < speed < math.inf for speed in speeds) or len(speeds) > self.workers:
            raise ConfigError(
                f"--speeds {self.speeds!r} must be at most {self.workers} numbers above 0 (one for each of --workers), "
                "such as 1,1,0.5"
            )
        return speeds

    @property
    def slo_s(self) -> tuple[float, float]:
        return self.ttft_slo, self.tbt_slo

    @property
    def policy_options(self) -> PolicyOptions:
        return PolicyOptions(**self._same(PolicyOptions))

    @property
    def cluster(self) -> ClusterConfig:
        return ClusterConfig(
            **self._same(ClusterConfig),
            num_prefill=self.prefill,
            num_decode=self.decode,
            num_workers=self.workers,
            model=LatencyModel(**self._same(LatencyModel)),
            shortest_first=self.order == "sjf",
            ttft_slo_s=self.ttft_slo,
            tbt_slo_s=self.tbt_slo,
        )

    def _same(self, other: type) -> dict[str, Any]:
        """Return the options for which ``other`` has a field of the same name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(other) if hasattr(self, f.name)}


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(ClusterOptions):
    """Options of ``tanghulu replay``."""

    live: str = option("", "send the trace to the running conductor at this URL instead of simulating one")
    scale: int = option(1, "live: divide the lengths of prompts and answers by this, 1 to 512", least=1, most=512)
    connections: int = option(256, "live: limit on concurrent requests", least=1, most=65536)
    compare: bool = option(False, "live: simulate the cluster described by the other options, too, and compare the two")
    plot: str = option("", "plot the policies side by side to this file, .png or .html (extra 'plot')")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.live:
            parse_url(self.live, path=True)

    def _refuse_pointless(self) -> None:
        if self.live and self.compare:
            self._refuse({"scale"}, "does not go with --compare: prompts are simulated in full")
        elif self.live:
            self._refuse(self.changed - {*_LIVE, *_LIVE_OUTPUT}, "means nothing to a running conductor (--live)")
        else:
            self._refuse(_ONLY_LIVE, "needs --live URL")
            super()._refuse_pointless()

    @property
    def policies(self) -> tuple[str, ...]:
        """Names given in --policy, or its default; "" is the conductor's own."""
        return super().policies if self.policy or not self.live else ("",)


def replay(config: ReplayConfig, progress: Progress | None = None) -> Iterator[ReplayReport]:
    """Yield a report for each trace and policy. Raises InvalidRequest for an unreadable trace."""
    one = _live_one if config.live else replay_one
    for path in config.traces:
        requests = read_trace(path, config.speedup, config.warmup, config.limit)
        for name in config.policies:
            with _bar(progress, f"{trace_name(path)} {name}", len(requests)) as advance:
                yield from one(config, path, name, requests, advance)


@contextlib.contextmanager
def _bar(progress: Progress | None, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a callback that displays the number of completed requests."""
    if progress is None:
        yield lambda done: None
        return
    task = progress.add_task(title, total=total)
    yield lambda done: progress.update(task, completed=done)
    progress.remove_task(task)


def trace_name(trace: Path) -> str:
    """Return the name of a trace in reports."""
    return trace.name.split(".")[0]


def replay_one(
    config: ClusterOptions, path: Path, policy: str, requests: list[TraceRequest], advance: Callable[[int], None]
) -> Iterator[ReplayReport]:
    """Yield the report of ``requests`` on the simulated cluster."""
    model = dataclasses.replace(config.cluster.model, block_tokens=requests[0].block_tokens)
    cluster = dataclasses.replace(config.cluster, model=model)
    simulation = make_simulation(cluster, make_policy(policy, config.policy_options))
    jobs = simulation.run(requests, advance)
    busy_s = [worker.busy_s for worker in simulation.prefills]
    yield make_report(trace_name(path), policy, jobs, busy_s, simulation.fetched_blocks, config.slo_s)


def _live_one(
    config: ReplayConfig, path: Path, policy: str, requests: list[TraceRequest], advance: Callable[[int], None]
) -> Iterator[ReplayReport]:
    live = LiveConfig(
        url=config.live,
        policy=policy,
        scale=config.scale,
        seed=config.seed,
        connections=config.connections,
        client=config,
    )
    found = replay_live(live, requests, advance)
    yield make_report(trace_name(path), policy or "(conductor's)", found.jobs, (), 0, config.slo_s)
    if found.interrupted:
        raise KeyboardInterrupt
    if config.compare:
        for simulated in replay_one(config, path, policy or "ttft-min", requests, advance):
            yield dataclasses.replace(simulated, policy=f"{simulated.policy} (simulated)")


def _run(config: ReplayConfig) -> None:
    """Run the replay; an interrupted one still reports its results so far, and exits with the code of Ctrl-C."""
    if config.plot:
        check_plot(Path(config.plot))
    found: list[ReplayReport] = []
    interrupted = False
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=config.json or not console.is_terminal) as progress:
        try:
            for report in replay(config, progress):
                found.append(report)
                if config.json:
                    click.echo(json.dumps(report.as_dict()))
        except KeyboardInterrupt:
            interrupted = True
    if not config.json:
        _print_tables(found, config.compare)
    if config.plot and found:
        write_plot(Path(config.plot), found)
    if interrupted:
        click.get_current_context().exit(_INTERRUPTED)


def _print_tables(reports: Sequence[ReplayReport], compare: bool) -> None:
    console = Console()
    console.width = max(console.width, _LEAST_WIDTH)
    for _, rows in itertools.groupby(reports, key=lambda report: report.trace):
        shown = list(rows)
        console.print(table(shown))
        for live, simulated in zip(shown[::2], shown[1::2], strict=False) if compare else ():
            console.print(f"{live.policy}: {deviation(live, simulated)}")


COMMAND = command(
    "replay", ReplayConfig, _run, "Replay request traces through the conductor's policies, in virtual time or live."
)
COMMAND.params.insert(
    0,
    click.Argument(["traces"], nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)),
)
