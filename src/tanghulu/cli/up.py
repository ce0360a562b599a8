"""``tanghulu up``: the embedded cluster, every part a real process, under one supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tanghulu.auth.credentials import NO_TLS
from tanghulu.auth.tls import client_context
from tanghulu.cli.children import ChildProcess
from tanghulu.cli.progress import Board, welcome
from tanghulu.cli.secure import SecureFiles, prepare
from tanghulu.cli.supervision import LOOKS, Supervision
from tanghulu.conductor.tools.choosing import AUTO, REASONING_PARSERS, TOOL_CALL_PARSERS
from tanghulu.errors import ConfigError, TanghuluError, error_from_code
from tanghulu.eviction import POLICIES
from tanghulu.runtime import extras
from tanghulu.runtime.config import MOST_PORT, check_bounds, command, configuration_file, option, read_table
from tanghulu.runtime.limits import refuse_too_much
from tanghulu.runtime.master_options import SecretOptions
from tanghulu.runtime.process import own_address, private_directory, stop_signals
from tanghulu.runtime.tasks import cancelled
from tanghulu.types import is_loopback

_READY_POLL_S = 0.1
#: A worker is restarted after a silence of this many times the conductor's limit.
_HUNG_TIMEOUTS = 2.0
#: Seconds that a process may take to exit beyond its own grace.
_END_S = 5.0
#: While the conductor is ending, workers finish its requests; then they have nothing left.
_STOP_ORDER = (("conductor",), ("prefill", "decode", "worker", "vllm-worker", "gateway"), ("node",), ("master",))
_VITAL = ("master", "conductor")
_MASTER_TO_NODES = 10  # 7400 -> 7410
_MASTER_TO_WORKERS = 30  # 7400 -> 7430
_MOST_OF_A_ROLE = 1000
_TO_METRICS = 100  # 7400 -> 7500, 7410 -> 7510; the conductor's metrics are on its HTTP port, too
#: Options that `up` alone sets for its parts; in their tables these keys would contradict it.
_DECIDED_HERE = frozenset({"host", "port", "metrics_port", "master", "run_dir"})
#: Roles that name blocks and move KV, and so have the cluster secret.
_KNOW_SECRET = frozenset({"conductor", "prefill", "decode", "worker", "vllm-worker"})
_PARTS = ("master", "node", "prefill", "decode", "worker", "vllm-worker", "conductor")


@dataclass(frozen=True, kw_only=True)
class UpConfig(SecretOptions):
    """The options of ``tanghulu up``."""

    model: str = option("smollm2", "a directory with safetensors or GGUF, a .gguf file, or smollm2", metavar="DIR")
    engine: str = option(
        "torch",
        "torch, vllm if installed, or mock, which imitates a model's timing",
        choices=("torch", "vllm", "mock"),
    )
    dtype: str = option("auto", "type of the weights", choices=("auto", "float32", "bfloat16", "float16"))
    kv_dtype: str = option(
        "auto",
        "type of the KV in cache, store and transfers; auto follows --dtype, int8 halves bfloat16 with a small loss",
        choices=("auto", "float32", "bfloat16", "int8"),
    )
    device: str = option("auto", "device of the workers: auto, cpu, cuda or cuda:N; auto and cuda use all GPUs in turn")
    batch_invariant: bool = option(
        False,
        "compute the same bits for a request whether it is batched, chunked, cached or moved; slows prefills down",
    )
    speculative: str = option(
        "", "ngram:K proposes up to K tokens that followed the last ones before; the same text in fewer steps"
    )
    prefill: int = option(1, "number of prefill workers", least=0, most=_MOST_OF_A_ROLE)
    decode: int = option(1, "number of decode workers", least=0, most=_MOST_OF_A_ROLE)
    workers: int = option(
        1,
        "number of workers for both phases, with --prefill 0 --decode 0 or --engine vllm",
        least=1,
        most=_MOST_OF_A_ROLE,
    )
    conductors: int = option(
        1, "number of conductors, which share the HTTP and gRPC ports", least=1, most=_MOST_OF_A_ROLE
    )
    nodes: int = option(1, "number of store nodes", least=0, most=_MOST_OF_A_ROLE)
    node_memory: int = option(1 << 30, "memory of each store node", size=True)
    node_ssd: int = option(0, "size of each store node's SSD tier, a file in --state-dir; 0 disables it", size=True)
    eviction: str = option("reuse", "eviction policy of the store nodes", choices=tuple(POLICIES))
    policy: str = option("ttft-min", "routing policy of the conductor")
    tool_call_parser: str = option(AUTO, "format of the model's tool calls", choices=TOOL_CALL_PARSERS)
    reasoning_parser: str = option(AUTO, "format of the model's reasoning", choices=REASONING_PARSERS)
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port of the HTTP API; 0 picks one")
    grpc_port: int = option(-1, "port of inference over gRPC; 0 picks one, -1 disables it", least=-1)
    master_port: int = option(7400, "port of the master; nodes follow from +10, workers from +30; 0 picks all")
    store_http_port: int = option(0, "port of the store over HTTP; 0 disables it")
    store_grpc_port: int = option(-1, "port of the store over gRPC, with --store-http-port; -1 disables it", least=-1)
    grace_s: float = option(10.0, "seconds for which running answers may continue at shutdown", least=0)
    worker_timeout_s: float = option(
        10.0,
        "seconds of a silent engine after which a worker loses its requests; it restarts after twice "
        "that; 0 disables it",
        least=0,
    )
    secure: bool = option(
        False, "use certificates, tokens and API keys everywhere, created in --state-dir at the first start"
    )
    checks: bool = option(False, "assert all invariants of nodes and workers (slow)", debug=True)
    mock_speedup: float = option(1.0, "speedup of the mock engine's timing", above=0, debug=True)
    mock_kv_token_bytes: int = option(16, "bytes of KV per token of the mock engine; a multiple of 8", debug=True)
    state_dir: Path = option(Path(".tanghulu"), "directory of cluster.json and logs")
    log_level: str = option("info", "lowest level to log", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
        check_bounds(self)
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                "--prefill and --decode need each other: set both above 0, or both to 0 to start --workers"
            )
        self._check_derived_ports()
        if self.cluster_secret and not self.cluster_secret.startswith("@"):
            raise ConfigError(
                "--cluster-secret of `tanghulu up` must be @FILE: as text, every user could read "
                "it in the list of processes"
            )
        self.shared_secret()
        if self.conductors > 1 and not (self.port and self.grpc_port):
            raise ConfigError("several --conductors share fixed ports: --port and --grpc-port cannot be 0")
        if self.batch_invariant and self.engine != "torch":
            raise ConfigError("--batch-invariant requires --engine torch")
        if self.kv_dtype != "auto" and self.engine != "torch":
            raise ConfigError("--kv-dtype requires --engine torch")
        if self.speculative and self.engine != "torch":
            raise ConfigError("--speculative requires --engine torch")
        if self.store_http_port and not self.secure and not is_loopback(self.host):
            raise ConfigError(
                f"--store-http-port with --host {self.host} would open the store to everybody: run "
                "`tanghulu store serve` by itself, with --tls-cert and --require-token"
            )

    def _check_derived_ports(self) -> None:
        """Raise ConfigError if the ports derived from --master-port are too high, or overlap."""
        base = self.master_port
        if not base:
            return
        num_workers = self.workers if self.engine == "vllm" else self.prefill + self.decode or self.workers
        used = [base, *range(base + _MASTER_TO_NODES, base + _MASTER_TO_NODES + self.nodes)]
        used += range(base + _MASTER_TO_WORKERS, base + _MASTER_TO_WORKERS + num_workers)
        used += [port + _TO_METRICS for port in used]
        if max(used) > MOST_PORT:
            most = base + MOST_PORT - max(used)
            raise ConfigError(
                f"--master-port {base}: the ports of the other processes follow it, up to {max(used)}, and the highest "
                f"port is {MOST_PORT}; choose one up to {most}, or 0 to pick all"
            )
        if len(set(used)) < len(used):
            raise ConfigError(
                f"the ports that follow --master-port {base} do not suffice for --nodes {self.nodes} and "
                f"{num_workers} workers; --master-port 0 picks all"
            )


class Cluster:
    """The running cluster: performs the decisions of Supervision and shows them on the Board."""

    def __init__(
        self, config: UpConfig, file: Path | None, run_dir: Path, board: Board, secure: SecureFiles | None = None
    ) -> None:
        self._config = config
        self._secure = secure
        self._secret = config.cluster_secret or ("" if secure is None else f"@{secure.folder / 'cluster.secret'}")
        self._file = file
        self._tables = _tables_of_parts(file)
        self._board = board
        self._plan = Supervision(hung_s=_HUNG_TIMEOUTS * config.worker_timeout_s)
        self._children: dict[str, ChildProcess] = {}
        self._run_dir = run_dir
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._failure: str | None = None
        self._broken: Exception | None = None  # a bug of our own; the state is unknown after it

    async def run(self) -> None:
        """Start all, keep them running until a signal or a child's final death; raises TanghuluError for the latter."""
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            # A terminal that is closed may send more than one SIGHUP: that is no request to hurry.
            loop.add_signal_handler(number, self._end if number is signal.SIGHUP else self._signalled)
        self._add("master", "master", self._config.master_port)
        announce = asyncio.create_task(self._announce_ready())
        watch = asyncio.create_task(self._kill_the_hung())
        try:
            while not self._stopping.is_set():
                await self._perform()
                await self._sleep()
        finally:
            await cancelled(announce, watch)
            self._plan.stop()
            self._board.say("stopping; a second Ctrl-C ends everything at once")
            await self._stop_children()
        if self._broken is not None:
            raise self._broken
        if self._failure is not None:
            raise TanghuluError(self._failure)

    # --- the processes to run

    def _add(self, role: str, name: str, port: int, *arguments: str) -> None:
        run_dir = self._run_dir / name
        base = ["--host", self._config.host, "--port", str(port), "--log-level", self._config.log_level]
        metrics = port + _TO_METRICS if port and role not in ("conductor", "gateway") else 0
        table, secure = self._tables.get(role, {}), self._secure
        shown = [] if secure is None else secure.options(role)
        if role in _KNOW_SECRET:
            base += ["--cluster-secret", self._secret] if self._secret else []
        given = without_options([*base, "--metrics-port", str(metrics), *arguments, *shown], table)
        if secure is not None:
            given += secure.flags(role)
        log_path = self._config.state_dir / f"{name}.log"
        try:
            log_path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot replace the log {log_path}: {error.strerror}; remove it") from None
        self._children[name] = ChildProcess(role, name, given, log_path, run_dir, self._file)
        self._plan.add(name, vital=role in _VITAL and not (role == "conductor" and self._config.conductors > 1))
        self._board.add(name)

    def _add_others(self, master: str) -> None:
        """Add all other processes: they need the master's address, with port 0 unknown until it is ready."""
        config, at = self._config, ("--master", master)
        base = config.master_port
        for i in range(config.nodes):
            memory = ("--memory", str(config.node_memory), "--eviction", config.eviction)
            ssd = ("--ssd-path", str(config.state_dir / f"node-{i}.tier"), "--ssd-size", str(config.node_ssd))
            below = ssd if config.node_ssd else ()
            self._add("node", f"node-{i}", base and base + _MASTER_TO_NODES + i, *at, *memory, *below, *self._checked)
        if config.engine == "vllm":
            roles = ["vllm-worker"] * config.workers
        else:
            roles = ["prefill"] * config.prefill + ["decode"] * config.decode or ["worker"] * config.workers
        for i, role in enumerate(roles):
            name = f"{role}-{i - config.prefill if role == 'decode' else i}"
            model = ["--model", config.model, "--dtype", config.dtype]
            if config.engine != "vllm":
                model += ["--engine", config.engine]
            if config.engine == "torch":
                model += ["--kv-dtype", config.kv_dtype]
                model += ["--device", config.device, "--device-turn", str(i), "--device-workers", str(len(roles))]
                model += ["--batch-invariant"] * config.batch_invariant
                model += ["--speculative", config.speculative] if config.speculative else []
            if config.engine == "mock":
                model += ["--debug", f"mock_speedup={config.mock_speedup}"]
                model += ["--debug", f"mock_kv_token_bytes={config.mock_kv_token_bytes}"]
            checked = self._checked if config.engine != "vllm" else ()
            self._add(role, name, base and base + _MASTER_TO_WORKERS + i, *at, *model, *checked)
        if config.store_http_port:
            grpc_port = str(config.store_grpc_port)  # even -1, or TANGHULU_GRPC_PORT, meant for conductors, would count
            self._add("gateway", "store-http", config.store_http_port, *at, "--grpc-port", grpc_port)
        ends = ("--grace-s", str(config.grace_s), "--notice-s", "0")
        timeout = ("--worker-timeout-s", str(config.worker_timeout_s))
        ports = ("--grpc-port", str(config.grpc_port))
        parsers = ("--tool-call-parser", config.tool_call_parser, "--reasoning-parser", config.reasoning_parser)
        given = (*at, "--policy", config.policy, *timeout, *ends, *ports, *parsers)
        shared = ("--reuse-port",) if config.conductors > 1 else ()
        for i in range(config.conductors):
            self._add("conductor", f"conductor-{i}" if i else "conductor", config.port, *given, *shared)

    @property
    def _checked(self) -> tuple[str, ...]:
        return ("--debug", "checks=true") if self._config.checks else ()

    # --- events

    def _on_status(self, name: str, message: dict[str, Any]) -> None:
        try:
            self._take(name, message)
        except Exception as error:
            self._broken = error
            self._end()
            raise

    def _take(self, name: str, message: dict[str, Any]) -> None:
        now_s, last_words = time.monotonic(), ""
        because: str | None = None  # the cluster has to end
        if self._stopping.is_set():
            return
        match message["event"]:
            case "ready":
                if name == "master" and len(self._children) == 1:
                    self._add_others(message["address"])  # first: the master alone is not the whole cluster
                self._plan.ready(name, now_s)
                self._write_cluster()
            case "failed" if _is_refusal(message["code"]):
                because = self._plan.refused(name, self._own_words(name, message["message"]))
            case "exited":
                last_words = self._children[name].last_words()
                because = self._plan.exited(name, message["code"], now_s, last_words)
            case "alive":
                self._plan.alive(name, now_s)
                return
        self._board.show(name, message)
        if because is not None:
            last = f'; its last line was: "{last_words}"' if last_words and last_words not in because else ""
            self._failure = f"{because}{last}; see {self._children[name].log_path}"
            self._end()
        self._wake.set()

    def _own_words(self, name: str, message: str) -> str:
        """Return a child's refusal, naming the flag of `up` behind the child's own."""
        return message if name.startswith("conductor") else message.replace("another --port", "another --master-port")

    def _signalled(self) -> None:
        """End in order; on a second signal, at once."""
        if self._stopping.is_set():
            for child in self._children.values():
                child.kill()
        self._end()

    def _end(self) -> None:
        self._stopping.set()
        self._wake.set()

    # --- instructions

    async def _perform(self) -> None:
        for name in self._plan.tick(time.monotonic()):
            child = self._children[name]
            try:
                child.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                await child.spawn(self._on_status)
            except OSError as error:  # a full disk, no process or descriptor available: treated as an immediate exit
                self._board.show(child.name, {"event": "failed", "message": str(error)})
                self._on_status(child.name, {"event": "exited", "code": os.EX_OSERR})
                continue
            self._board.show(child.name, {"event": "starting"})
        self._write_cluster()

    async def _sleep(self) -> None:
        due_s = self._plan.next_tick_s()
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), timeout_s)
        self._wake.clear()

    async def _kill_the_hung(self) -> None:
        while self._plan.hung_s:
            await asyncio.sleep(self._plan.hung_s / LOOKS)
            for hung in self._plan.look(time.monotonic()):
                self._board.show(hung, {"event": "hung"})
                self._children[hung].kill()

    async def _stop_children(self) -> None:
        """Stop the conductor first, which finishes or fails its answers, and the master, where all deregister, last."""
        for roles in _STOP_ORDER:
            ending = [child for child in self._children.values() if child.role in roles]
            await asyncio.gather(*(child.stop(self._config.grace_s + _END_S) for child in ending))

    def _write_cluster(self) -> None:
        entries = [c.entry() for c in self._children.values() if c.info]
        path = self._config.state_dir / "cluster.json"
        scratch = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):  # a full disk, or a directory that somebody removed: the cluster continues
            scratch.write_text(json.dumps(entries, indent=2) + "\n")
            scratch.replace(path)

    async def _announce_ready(self) -> None:
        """Poll the conductor until it would serve a request, then print what to try."""
        secure, shown, tls = self._secure, {}, NO_TLS
        if secure is not None:
            shown, tls = {"authorization": f"Bearer {secure.key_file.read_text().strip()}"}, secure.tls
        context = client_context(tls)
        async with httpx.AsyncClient(trust_env=False, timeout=2.0, headers=shown, verify=context) as http:
            while True:
                await asyncio.sleep(_READY_POLL_S)
                conductor = self._children.get("conductor")
                if conductor is None or not conductor.info or not self._plan.all_ready:
                    continue
                with contextlib.suppress(httpx.HTTPError):
                    url = f"{'http' if secure is None else 'https'}://{conductor.info['address']}"
                    if (await http.get(f"{url}/ready")).status_code == 200:
                        models = await http.get(f"{url}/v1/models")
                        # With API keys of the user's own (TANGHULU_API_KEYS) the list is denied to us.
                        model = models.json()["data"][0]["id"] if models.is_success else "MODEL"
                        master = self._children["master"].info["address"]
                        files = None if secure is None else (secure.key_file, secure.authority)
                        welcome(self._board, url, model, master, self._store_url(), files)
                        return

    def _store_url(self) -> str:
        gateway = self._children.get("store-http")
        scheme = "http" if self._secure is None else "https"
        return f"{scheme}://{gateway.info['address']}" if gateway is not None else ""


def without_options(arguments: Sequence[str], table: Mapping[str, Any]) -> list[str]:
    """Return ``arguments``, flags with any values, without those set by a part's own table."""
    kept: list[str] = []
    is_kept = True
    for each in arguments:
        if each.startswith("--"):
            is_kept = each.removeprefix("--").replace("-", "_") not in table
        if is_kept:
            kept.append(each)
    return kept


def _tables_of_parts(file: Path | None) -> dict[str, dict[str, Any]]:
    """Return the tables of ``file`` for the cluster's processes; raises ConfigError for options set by `up`."""
    contents: dict[str, dict[str, Any]] = read_table(file) if file is not None else {}
    tables = {role: contents.get(role, {}) for role in _PARTS}
    for role, table in tables.items():
        for key in sorted(table.keys() & _DECIDED_HERE):
            raise ConfigError(f"{file}: [{role}] {key} is set by `tanghulu up` for all its processes; remove it")
    return tables


def _is_refusal(code: str) -> bool:
    """Return whether a child that failed with this error code would fail again."""
    return code != TanghuluError.code and not error_from_code(code, "").retryable


def _names(host: str) -> tuple[str, ...]:
    """Return the names in the certificates of a cluster at ``host``."""
    return (host,) if host not in ("", "0.0.0.0", "::") else (socket.gethostname(), own_address())


@contextlib.contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir} cannot be used: {error.strerror}; choose another") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"a cluster is running with --state-dir {state_dir}; end it or choose another") from None
        yield


def run(config: UpConfig) -> None:
    """Run the cluster in the foreground until it is stopped."""
    # Logs, cluster.json and SSD files of all processes of the cluster are private to this user.
    os.umask(0o077)
    if config.engine == "torch":
        extras.require("worker", "--engine torch")
    if config.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError("--engine vllm: vLLM is not installed here; run `tanghulu up` in vLLM's environment")
    file = configuration_file()
    if config.nodes:
        refuse_too_much(config.nodes * config.node_memory, f"--nodes {config.nodes} of --node-memory, together")
    with _locked(config.state_dir):
        secure = prepare(config.state_dir / "secure", _names(config.host)) if config.secure else None
        try:
            with private_directory() as run_dir, Board() as board:
                asyncio.run(Cluster(config, file, run_dir, board, secure).run())
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.state_dir / "cluster.json")
    sys.stdout.flush()


COMMAND = command("up", UpConfig, run, "Start the embedded cluster and keep it running until Ctrl-C.")
