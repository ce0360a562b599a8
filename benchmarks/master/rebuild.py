"""Masters that are killed and restarted: how soon every key is known again, and whether one is ever denied.

    python -m benchmarks.master.rebuild --keys 3000000 --nodes 3
    python -m benchmarks.master.rebuild --keys 10000000 --nodes 100 --masters 4 --processes 2

starts masters (processes as users start them, several of them with a real etcd) and nodes (``node_farm``: whole nodes,
many in a process, which hold generated keys), and clients that ask for known keys, get some and put new ones all the
time. A single master is killed with SIGKILL and started again at its port. Of several the leader is killed, which owns
its share of the ranges, too; the others take over, and when they know every key it is started again and gets ranges
back; so as often as there are masters. ``exists`` and ``get`` must never say no, what is put meanwhile must be there
afterwards, and nothing may fail. In the end every key is asked for. Prints JSON; ``--keep NAME`` writes it to results/.

CPU times are the kernel's, of the masters' processes: what a key costs that is told to them is taken while they are
asked for nothing else, from the first key until all are known.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import tanghulu
from benchmarks.common.report import keep
from benchmarks.master.node_farm import Farm, key_of, value_of
from benchmarks.master.scale import ProcessMeter
from tanghulu.errors import ChunkNotFound, TanghuluError
from tanghulu.store.protocol.key_slots import NUM_RANGES
from tests.store.cluster import Cluster, Process
from tests.store.elected_cluster import ElectedCluster

BATCH = 2000
#: What clients do; each does one of them, so that a question that waits keeps no get from being made.
KINDS = ("exists", "get", "put")
#: Keys of a question, and the pause of a client between two calls.
ASKED, PAUSE_S = 200, 0.01
#: Of a call, so that it outlives the restart and the rebuilding behind it.
DEADLINE_S = 60.0
#: Within which masters that know nothing must know everything; far more than it takes.
REBUILD_DEADLINE_S = 600.0
#: Denials listed one by one.
MOST_LISTED = 50
#: Memory of a node for each of its keys, and beside them for those of clients.
BYTES_PER_KEY, SPARE_BYTES = 256, 16 << 20


class Asking(threading.Thread):
    """A client that makes one kind of call until it is ended; counts what was denied."""

    def __init__(self, what: str, address: str, num_keys: int, name: str) -> None:
        super().__init__(name=name)
        self.what = what
        self._client = tanghulu.connect(address, deadline_s=DEADLINE_S, transport="tcp")
        self._num_keys = num_keys
        self._rng = random.Random(name)
        self.ended = threading.Event()
        self.num_asked = self.num_got = 0
        self.put: list[tuple[str, bytes]] = []
        self.waits: list[tuple[float, float]] = []  # began, seconds
        self.denied: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        step = {"exists": self._ask, "get": self._get, "put": self._put}[self.what]
        while not self.ended.is_set():
            self._timed(step)
            time.sleep(PAUSE_S)
        self._client.close()

    def _timed(self, step: Callable[[], None]) -> None:
        began_s = time.monotonic()
        try:
            step()
        except TanghuluError as error:
            self.failures.append(f"{self.what}: {error.code} after {time.monotonic() - began_s:.2f} s: {error.message}")
        self.waits.append((began_s, time.monotonic() - began_s))

    def _ask(self) -> None:
        numbers = [self._rng.randrange(self._num_keys) for _ in range(ASKED)]
        held = self._client.exists_many([key_of(n) for n in numbers])
        self.num_asked += len(held)
        for number, is_held in zip(numbers, held, strict=True):
            if not is_held:
                self._denied(number)

    def _get(self) -> None:
        number = self._rng.randrange(self._num_keys)
        try:
            with self._client.get(key_of(number)) as chunk:
                if chunk.bytes() != value_of(number):
                    self.failures.append(f"get: another value of {key_of(number)}")
        except ChunkNotFound:
            self._denied(number)
        self.num_got += 1

    def _denied(self, number: int) -> None:
        """Remember when, to the second: masters' logs say which nodes were gone then."""
        self.denied.append(f"{time.strftime('%H:%M:%S')} {self.what} {key_of(number)}")

    def _put(self) -> None:
        key, value = f"kv/new/{self._rng.getrandbits(64):x}", self._rng.randbytes(64)
        self._client.put(key, value)
        self.put.append((key, value))


def waits_of(loads: list[Asking], since_s: float, until_s: float) -> dict[str, Any]:
    """How long the calls took that were under way between two times."""
    shown: dict[str, Any] = {}
    for what in KINDS:
        took_s = sorted(
            took
            for load in loads
            if load.what == what
            for began, took in load.waits
            if began < until_s and began + took > since_s
        )
        if took_s:
            shown[what] = {
                "count": len(took_s),
                "p50_s": round(statistics.median(took_s), 4),
                "max_s": round(took_s[-1], 2),
            }
    return shown


class Masters:
    """The masters of a cluster as a whole."""

    def __init__(self, cluster: Cluster, num_masters: int) -> None:
        self.cluster = cluster
        self._shares = num_masters > 1

    @property
    def address(self) -> str:
        return self.cluster.address

    @property
    def living(self) -> list[Process]:
        found = self.cluster.masters if self._shares else [self.cluster.master]
        return [each for each in found if each.alive]

    def meters(self) -> list[ProcessMeter]:
        return [ProcessMeter(each.popen.pid) for each in self.living]

    @property
    def num_keys(self) -> int:
        return int(sum(each.metric("tanghulu_master_keys") for each in self.living))

    def num_announced(self, report: str) -> int:
        """How many messages of nodes there were with a ``piece`` of a report, or with ``none``."""
        name = "tanghulu_master_announcements_total"
        return int(sum(each.metric(name, report=report) for each in self.living))

    @property
    def num_expired(self) -> int:
        """How many nodes did not renew their leases, or did not come to a new leader in time."""
        name, found = "tanghulu_master_expired_leases_total", 0
        for each in self.living:
            with suppress(KeyError):  # it has counted none
                found += int(each.metric(name, component="node"))
        return found

    @property
    def owned(self) -> list[int]:
        """How many ranges each of them owns."""
        if not self._shares:
            return [NUM_RANGES]
        return [int(each.metric("tanghulu_master_owned_ranges")) for each in self.living]

    @property
    def know_all(self) -> bool:
        """Whether they own everything between them, and no node has anything left to tell."""
        return sum(self.owned) == NUM_RANGES and all(
            each.metric("tanghulu_master_rebuilding") == 0 for each in self.living
        )

    @property
    def is_even(self) -> bool:
        owned = self.owned
        return max(owned) - min(owned) <= 1


def when(condition: Callable[[], bool], since_s: float, pause_s: float = 0.5) -> float:
    """Seconds from ``since_s`` until ``condition`` holds. To look costs each master some milliseconds."""
    while not condition():
        if time.monotonic() > since_s + REBUILD_DEADLINE_S:
            raise SystemExit("the masters do not come to know all keys")
        time.sleep(pause_s)
    return time.monotonic() - since_s


@contextmanager
def started(options: argparse.Namespace) -> Iterator[Cluster]:
    """The masters alone."""
    with ElectedCluster(options.masters, 0, ttl_s=options.ttl_s) if options.masters > 1 else Cluster(0) as cluster:
        yield cluster


def start_nodes(stack: ExitStack, address: str, options: argparse.Namespace) -> list[Farm]:
    """All nodes, in ``options.processes`` processes."""
    per_node, per_farm = options.keys // options.nodes, options.nodes // options.processes
    memory = str(per_node * BYTES_PER_KEY + SPARE_BYTES)
    found = []
    for index in range(options.processes):
        flags = ["--num-nodes", str(per_farm), "--first-key", str(index * per_farm * per_node)]
        flags += ["--keys-per-node", str(per_node), "--master", address, "--port", "0", "--memory", memory]
        found.append(Farm(*flags, "--log-level", "error"))
        stack.callback(found[-1].stop)
    return found


def report(masters: Masters, nodes: list[Farm], num_keys: int) -> dict[str, Any]:
    """What it costs the masters to be told all keys for the first time."""
    meters = masters.meters()
    with ThreadPoolExecutor(len(nodes)) as pool:
        filling = [pool.submit(farm.wait, "filled") for farm in nodes]
        known = 0
        while not known and not all(each.done() for each in filling):
            cpu_s, num_bytes = [each.cpu_s for each in meters], [each.num_bytes for each in meters]
            began_s = time.monotonic()
            time.sleep(1.0)
            known = masters.num_keys  # the first nodes report while others are still being filled
        for each in filling:
            each.result()
    when(lambda: masters.num_keys >= num_keys, began_s, 1.0)
    took_s = when(lambda: masters.know_all, began_s)
    spent_s = [meter.cpu_s - before for meter, before in zip(meters, cpu_s, strict=True)]
    grown = sum(meter.num_bytes - before for meter, before in zip(meters, num_bytes, strict=True))
    for farm in nodes:
        farm.wait("ready")
    filled = sum(each.private_bytes["filled"] - each.private_bytes["opened"] for each in nodes)
    return {
        "first_report_s": round(took_s, 1),
        "masters_cpu_s": [round(each, 2) for each in spent_s],
        "master_cpu_us_per_key": round(sum(spent_s) / num_keys * 1e6, 2),
        "keys_per_s_of_a_core": round(num_keys / sum(spent_s)),
        "messages_with_pieces": masters.num_announced("piece"),
        "messages_without": masters.num_announced("none"),
        "master_bytes_per_key": round(grown / num_keys),
        "node_bytes_per_key": round(filled / num_keys),
    }


def lose_one(masters: Masters, nodes: list[Farm], loads: list[Asking]) -> dict[str, Any]:
    """Kill a master, and start it again: one of several when the others know everything."""
    cluster = masters.cluster
    meters = {each.address: ProcessMeter(each.popen.pid) for each in masters.living}
    farms = [ProcessMeter(each.popen.pid) for each in nodes]
    nodes_s = sum(each.cpu_s for each in farms)
    began_s = time.monotonic()
    if not isinstance(cluster, ElectedCluster):
        cluster.restart_master()
        known_s = when(lambda: masters.know_all, began_s)
        return {"all_known_s": round(known_s, 2), "waits": waits_of(loads, began_s, began_s + known_s)}
    victim = cluster.leader()
    num_ranges = int(victim.metric("tanghulu_master_owned_ranges"))
    del meters[victim.address]
    before = {address: meter.cpu_s for address, meter in meters.items()}
    began_s = time.monotonic()
    victim.kill()
    owned_s = when(lambda: sum(masters.owned) == NUM_RANGES, began_s, 0.02)
    cluster.leader(victim.address)
    led_s = time.monotonic() - began_s
    known_s = when(lambda: masters.know_all, began_s)
    spent = [round(meter.cpu_s - before[address], 2) for address, meter in meters.items()]
    nodes_s = sum(each.cpu_s for each in farms) - nodes_s
    replaced_s = time.monotonic()
    cluster.replace(victim)
    even_s = when(lambda: masters.is_even and masters.know_all, replaced_s)
    return {
        "ranges_lost": num_ranges,
        "owned_again_s": round(owned_s, 2),
        "led_again_s": round(led_s, 2),
        "all_known_s": round(known_s, 2),
        "survivors_cpu_s": spent,
        "nodes_cpu_s": round(nodes_s, 2),
        "waits": waits_of(loads, began_s, began_s + known_s),
        "given_back_and_known_s": round(even_s, 2),
        "waits_giving_back": waits_of(loads, replaced_s, replaced_s + even_s),
    }


def check(address: str, num_keys: int, loads: list[Asking], options: argparse.Namespace) -> dict[str, Any]:
    """Ask for all keys, and read a sample and what was put meanwhile."""
    began_s = time.monotonic()
    with tanghulu.connect(address, deadline_s=DEADLINE_S, transport="tcp") as client:
        num_missing = 0
        for start in range(0, num_keys, BATCH):
            keys = [key_of(n) for n in range(start, min(start + BATCH, num_keys))]
            num_missing += client.exists_many(keys).count(False)
        wanted = [
            (key_of(n), value_of(n))
            for n in random.Random(options.seed).sample(range(num_keys), min(num_keys, options.sample))
        ]
        wanted += [each for load in loads for each in load.put]
        num_wrong = 0
        for key, value in wanted:
            try:
                with client.get(key) as chunk:
                    num_wrong += chunk.bytes() != value
            except TanghuluError:
                num_wrong += 1
    return {
        "missing_in_the_end": num_missing,
        "read_in_the_end": len(wanted),
        "unreadable_in_the_end": num_wrong,
        "check_s": round(time.monotonic() - began_s, 1),
    }


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The figures of all of it, and of each loss."""
    num_keys = options.keys // options.nodes * options.nodes
    loads: list[Asking] = []
    with started(options) as cluster, ExitStack() as stack:
        masters = Masters(cluster, options.masters)
        if isinstance(cluster, ElectedCluster):
            when(lambda: sum(masters.owned) == NUM_RANGES and masters.is_even, time.monotonic())
        nodes = start_nodes(stack, cluster.address, options)
        facts = report(masters, nodes, num_keys)
        print(json.dumps(facts), flush=True)
        loads += [
            Asking(KINDS[n % len(KINDS)], cluster.address, num_keys, f"{options.seed}-{n}")
            for n in range(options.clients)
        ]
        for load in loads:
            load.start()
        time.sleep(options.quiet_s)
        facts["waits_before"] = waits_of(loads, 0.0, time.monotonic())
        losses = []
        for _ in range(options.losses or options.masters):
            num_denied = sum(len(each.denied) for each in loads)
            losses.append(lose_one(masters, nodes, loads))
            losses[-1] |= {
                "denied": sum(len(each.denied) for each in loads) - num_denied,
                "nodes_expired_of_living_masters": masters.num_expired,
                "load_average": round(os.getloadavg()[0], 1),
            }
            print(json.dumps(losses[-1]), flush=True)
            time.sleep(options.quiet_s)
        for load in loads:
            load.ended.set()
        for load in loads:
            load.join()
        facts |= {
            "asked": sum(each.num_asked for each in loads),
            "got": sum(each.num_got for each in loads),
            "put": sum(len(each.put) for each in loads),
            "denied": sum(len(each.denied) for each in loads),
            "denials": sorted(denial for each in loads for denial in each.denied)[:MOST_LISTED],
            "failures": [failure for each in loads for failure in each.failures],
        }
        return facts | check(cluster.address, num_keys, loads, options), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=300_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--masters", type=int, default=1, help="several share the keys, on an etcd")
    parser.add_argument("--processes", type=int, default=1, help="that the nodes are spread over, as many in each")
    parser.add_argument("--clients", type=int, default=6, help="a third asks, a third gets, a third puts")
    parser.add_argument("--losses", type=int, default=0, help="of masters; 0: as many as there are")
    parser.add_argument("--ttl-s", type=float, default=3.0, help="of the masters' leases in etcd; theirs is 3 s")
    parser.add_argument("--quiet-s", type=float, default=5.0, help="before each loss")
    parser.add_argument("--sample", type=int, default=20_000, help="keys that are read in the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", default="", help="write results/NAME.json")
    options = parser.parse_args()
    load_average = os.getloadavg()[0]
    facts, losses = measure(options)
    facts |= {"load_average_before": round(load_average, 1), "load_average": round(os.getloadavg()[0], 1)}
    if options.keep:
        keep(options.keep, losses, seed=options.seed, facts=facts)
    print(json.dumps({"facts": facts, "losses": losses}, indent=2))


if __name__ == "__main__":
    main()
