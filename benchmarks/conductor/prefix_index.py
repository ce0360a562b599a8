"""The prefix index: look-ups, events and memory, beside Dynamo's Python RadixTree binding in one run.

    python -m benchmarks.conductor.prefix_index --peer-python VENV/bin/python      # VENV has ai-dynamo-runtime==1.6.1
    python -m benchmarks.conductor.prefix_index --soak 50000000

In the load *alone* a bare dict of blocks is the third: what no index of single blocks in Python can be faster than.
Each index lives in a process of its own (the peer's in its own virtual environment) and does one round when the driver
says so, in turns, so that a busy machine troubles both. A round asks for random chains, every time as fresh objects,
as a prompt's hashes are. ``first`` are the look-ups before which a chain was never asked for.

Loads: *alone*: each chain is at one of the holders; *prefixes*: at all 16, at holder k the first (k + 1) / 16 of it.
Memory is the growth of the resident set while the index fills, the hashes included. Events (blocks a second) are timed
around ``apply`` by wall clock and by CPU time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HASH_BYTES = 16
Chain = list[bytes]


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stopwatch:
    """Sums wall clock and CPU time (of all threads) of what runs under it."""

    def __init__(self) -> None:
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> None:
        self.wall_s -= time.perf_counter()
        self.cpu_s -= time.process_time()

    def __exit__(self, *_: object) -> None:
        self.cpu_s += time.process_time()
        self.wall_s += time.perf_counter()

    def rates(self, what: str, num_blocks: int) -> dict[str, float]:
        """Blocks a second of either; the second is what a busy machine troubles less."""
        return {f"{what}_per_s": num_blocks / self.wall_s, f"{what}_per_cpu_s": num_blocks / self.cpu_s}


class Ours:
    """tanghulu's index."""

    def __init__(self) -> None:
        from tanghulu.conductor.index import prefix_index

        self._module = prefix_index
        self.index = prefix_index.PrefixIndex()
        self.match: Callable[[Any], Any] = self.index.match

    def stored(self, holder: int, chain: Chain) -> Any:
        return self._module.Stored(f"worker-{holder}", chain)

    def removed(self, holder: int, blocks: Chain) -> Any:
        return self._module.Removed(f"worker-{holder}", blocks)

    def apply(self, event: Any) -> None:
        self.index.apply(event)

    def question(self, chain: Chain) -> Any:
        return chain

    def answer(self, found: Any) -> dict[int, int]:
        return {int(holder.split("-")[1]): num for holder, num in found.items()}


class Dict:
    """The least that an index of single blocks does: a dict from each block to its only holder. Load *alone* only."""

    def __init__(self) -> None:
        self._holder_of: dict[bytes, int] = {}
        self.match: Callable[[Any], Any] = self._match

    def _match(self, chain: Chain) -> dict[int, int]:
        holder = self._holder_of.get(chain[0])
        return {} if holder is None else {holder: sum(map(self._holder_of.__contains__, chain))}

    def stored(self, holder: int, chain: Chain) -> Any:
        return holder, chain

    def removed(self, holder: int, blocks: Chain) -> Any:
        return None, blocks

    def apply(self, event: Any) -> None:
        holder, blocks = event
        if holder is not None:
            self._holder_of.update(dict.fromkeys(blocks, holder))
            return
        for block in blocks:
            del self._holder_of[block]

    def question(self, chain: Chain) -> Any:
        return chain

    def answer(self, found: Any) -> dict[int, int]:
        return dict(found)


class Dynamo:
    """The Python binding of Dynamo's radix tree: 64-bit names, events as JSON, a thread of its own behind it."""

    def __init__(self) -> None:
        from dynamo._core import RadixTree

        self._tree = RadixTree()
        self.match: Callable[[Any], Any] = self._tree.find_matches

    def stored(self, holder: int, chain: Chain) -> Any:
        names = self.question(chain)
        blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
        return holder, json.dumps({"event_id": 0, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}).encode()

    def removed(self, holder: int, blocks: Chain) -> Any:
        data = {"removed": {"block_hashes": self.question(blocks)}}
        return holder, json.dumps({"event_id": 0, "data": data}).encode()

    def apply(self, event: Any) -> None:
        self._tree.apply_event(*event)

    def question(self, chain: Chain) -> Any:
        return [int.from_bytes(name[:8], "little") for name in chain]

    def answer(self, found: Any) -> dict[int, int]:
        return {holder: num for (holder, _rank), num in found.scores.items()}


SIDES: dict[str, Callable[[bool], Any]] = {"tanghulu": Ours, "dict": Dict, "dynamo": Dynamo}


class Side:
    """One index in this process, with the same load for both."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._index = SIDES[args.side]()
        self._num_chains = -(-args.blocks // args.depth)
        self._names = random.Random(args.seed).randbytes(HASH_BYTES * args.depth * self._num_chains)
        self._asked: set[int] = set()
        self._chance = random.Random(args.seed + 1)

    def chain(self, number: int) -> Chain:
        """The hashes of a chain, as fresh objects."""
        start, size = number * self._args.depth * HASH_BYTES, self._args.depth * HASH_BYTES
        return [self._names[at : at + HASH_BYTES] for at in range(start, start + size, HASH_BYTES)]

    def holders(self, number: int) -> Iterator[tuple[int, int]]:
        """(holder, blocks) of a chain."""
        if self._args.load == "alone":
            yield number % self._args.holders, self._args.depth
        else:
            for holder in range(self._args.holders):
                yield holder, self._args.depth * (holder + 1) // self._args.holders

    def fill(self) -> dict[str, float]:
        """All chains, an event for each holder of each."""
        gc.collect()
        before, clock, num_blocks = resident_bytes(), Stopwatch(), 0
        for number in range(self._num_chains):
            chain = self.chain(number)
            events = [self._index.stored(holder, chain[:num]) for holder, num in self.holders(number)]
            with clock:
                for event in events:
                    self._index.apply(event)
            num_blocks += sum(num for _, num in self.holders(number))
            del chain, events
        self._settle(clock)
        gc.collect()
        grown = (resident_bytes() - before) / (self._num_chains * self._args.depth)
        return {**clock.rates("stored", num_blocks), "bytes_per_block": grown}

    def _settle(self, clock: Stopwatch) -> None:
        """The peer's thread has done all before it answers."""
        question = self._index.question(self.chain(0))
        with clock:
            self._index.match(question)

    def ask(self) -> dict[str, list[float]]:
        us: dict[str, list[float]] = {"first": [], "hit": [], "miss": []}
        for _ in range(self._args.lookups):
            number = self._chance.randrange(self._num_chains)
            kind = "hit" if number in self._asked else "first"
            self._asked.add(number)
            found = self._timed(us[kind], self.chain(number))
            assert self._index.answer(found) == dict(self.holders(number)), number
            absent = self._chance.randbytes(HASH_BYTES * self._args.depth)
            found = self._timed(us["miss"], [absent[at : at + HASH_BYTES] for at in range(0, len(absent), HASH_BYTES)])
            assert not self._index.answer(found)
        return us

    def _timed(self, us: list[float], chain: Chain) -> Any:
        question = self._index.question(chain)
        start = time.perf_counter()
        found = self._index.match(question)
        us.append(1e6 * (time.perf_counter() - start))
        return found

    def churn(self) -> dict[str, float]:
        """Every eighth chain is evicted from its tail, 32 blocks an event, and num_blocks again."""
        removed, again, num_blocks = Stopwatch(), Stopwatch(), 0
        for number in range(0, self._num_chains, 8):
            chain = self.chain(number)
            for holder, num in self.holders(number):
                tail = chain[:num][::-1]
                gone = [self._index.removed(holder, tail[at : at + 32]) for at in range(0, num, 32)]
                come = self._index.stored(holder, chain[:num])
                with removed:
                    for event in gone:
                        self._index.apply(event)
                with again:
                    self._index.apply(come)
                num_blocks += num
        self._settle(again)
        return {**removed.rates("removed", num_blocks), **again.rates("stored_again", num_blocks)}

    def serve(self) -> None:
        """Does what each line on stdin names and answers with a line of JSON."""
        for line in sys.stdin:
            print(json.dumps(getattr(self, line.strip())()), flush=True)


class Child:
    """A side in a process of its own."""

    def __init__(self, python: str, side: str, load: str, args: argparse.Namespace) -> None:
        options = ["blocks", "depth", "holders", "lookups", "seed"]
        command = [python, "-m", "benchmarks.conductor.prefix_index", "--side", side, "--load", load]
        command += [word for name in options for word in (f"--{name}", str(getattr(args, name)))]
        self.side, self.load = side, load
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, what: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(what, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


def compare(args: argparse.Namespace, load: str) -> list[dict[str, Any]]:
    """One load on both sides, in turns."""
    children = [Child(sys.executable, "tanghulu", load, args)]
    if load == "alone":
        children.append(Child(sys.executable, "dict", load, args))
    if args.peer_python:
        children.append(Child(args.peer_python, "dynamo", load, args))
    rows = [{"index": child.side, "load": load, **child.do("fill")} for child in children]
    samples: list[dict[str, list[float]]] = [{} for _ in children]
    for _ in range(args.rounds):
        for child, sample in zip(children, samples, strict=True):
            for kind, us in child.do("ask").items():
                sample.setdefault(kind, []).extend(us)
    for child, row, sample in zip(children, rows, samples, strict=True):
        for kind, us in sample.items():
            row |= {f"{kind}_p50_us": statistics.median(us), f"{kind}_p99_us": statistics.quantiles(us, n=100)[98]}
        row |= child.do("churn")
        child.end()
    return rows


def by_depth(seed: int) -> list[dict[str, Any]]:
    """Our full hit on one chain among 16 holders' prefixes, by depth; asked 200 times."""
    rows = []
    for depth in (32, 128, 512, 2048, 8192):
        args = argparse.Namespace(
            side="tanghulu", load="alone", blocks=depth * 64, depth=depth, holders=16, lookups=200, seed=seed
        )
        side = Side(args)
        side.fill()
        side.ask()
        us = side.ask()["hit"]
        rows.append({"index": "tanghulu", "load": f"depth {depth}", "hit_p50_us": statistics.median(us)})
    return rows


def soak(args: argparse.Namespace) -> list[dict[str, Any]]:
    """``--soak`` blocks of events with a stable live set: the oldest chain goes, tail first, a new one comes."""
    from tanghulu.conductor.index.prefix_index import PrefixIndex, Removed, Stored

    chance, index, live, rows = random.Random(args.seed), PrefixIndex(), [], []
    num_blocks, start, next_row = 0, time.perf_counter(), 0
    while num_blocks < args.soak:
        names = chance.randbytes(HASH_BYTES * args.depth)
        chain = [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)]
        holder = f"worker-{chance.randrange(args.holders)}"
        for at in range(0, args.depth, 64):
            index.apply(Stored(holder, chain[at : at + 64]))
        index.match(chain)
        live.append((holder, names))
        num_blocks += args.depth
        if len(live) > args.soak_live // args.depth:
            place = chance.randrange(len(live))
            live[place], live[-1] = live[-1], live[place]
            holder, names = live.pop()
            tail = [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)][::-1]
            for at in range(0, args.depth, 64):
                index.apply(Removed(holder, tail[at : at + 64]))
            num_blocks += args.depth
        if num_blocks >= next_row:
            next_row += args.soak // 10
            rows.append(
                {"load": f"soak {num_blocks}", "resident_mib": resident_bytes() / 2**20, "blocks": index.num_blocks}
            )
            print(rows[-1], f"{time.perf_counter() - start:.0f} s", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--depth", type=int, default=512)
    parser.add_argument("--holders", type=int, default=16)
    parser.add_argument("--lookups", type=int, default=500, help="look-ups a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer-python", help="python of a virtual environment with ai-dynamo-runtime")
    parser.add_argument("--soak", type=int, default=0, help="blocks of events; nothing else is measured then")
    parser.add_argument("--soak-live", type=int, default=200_000)
    parser.add_argument("--keep", metavar="NAME", help="write results/NAME.json")
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    parser.add_argument("--load", choices=["alone", "prefixes"], default="alone", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        Side(args).serve()
        return
    load_before = os.getloadavg()
    rows = soak(args) if args.soak else [*compare(args, "alone"), *compare(args, "prefixes"), *by_depth(args.seed)]
    for row in rows:
        print({name: round(value, 1) if isinstance(value, float) else value for name, value in row.items()})
    if args.keep:
        from benchmarks.common import report

        print(report.keep(args.keep, rows, seed=args.seed, load_before=load_before, load_after=os.getloadavg()))


if __name__ == "__main__":
    main()
