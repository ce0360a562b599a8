"""A deployment under load in which something breaks every two seconds, by a plan drawn from a seed.

    python -m tests.e2e.faults.chaos [--seconds 600] [--seed N] [--real --clients 6]

The plan depends on the seed alone, so that a run can be had again: what breaks, when, how and for how long. At the end
everything is mended, and nothing may be lost, wrong, or left over.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.faults.asking import Ask
from tests.e2e.faults.load import ASKS, Load
from tests.e2e.faults.parts import Part, Worker
from tests.e2e.faults.pool import WORKER_TIMEOUT_S, Pool
from tests.e2e.faults.standing import until

NUM_CLIENTS = 50
EVERY_S = 2.0
_PROCESS_FAULTS = ("SIGKILL", "SIGTERM", "SIGSTOP")
_WORKER_FAULTS = (*_PROCESS_FAULTS, "hang", "cut", "black hole")
#: How often a part breaks of each kind, and how many of the kind must be well meanwhile.
_WEIGHTS = {"prefill": 3, "decode": 5, "node": 2, "master": 2, "conductor": 1}
_LEAST_WELL = {"prefill": 1, "decode": 1, "node": 2, "master": 2, "conductor": 1}
_NUM = {"prefill": 2, "decode": 3, "node": 3, "master": 3, "conductor": 2}
#: Faults that last; the others are over at once, but for the start of a new process.
_LASTING = frozenset({"SIGSTOP", "hang", "black hole"})
_LEAST_S, _MOST_S = 0.5, 12.0
#: In float32, where a text does not depend on what is computed beside it; a step of many takes long on a busy machine.
REAL = ("--model", "smollm2", "--dtype", "float32", "--kv-memory", "128MiB", "--max-num-batched-tokens", "128")
REAL_TIMEOUT_S = 30.0
#: A part is left alone for so long behind its fault: a process starts.
_RECOVERY_S = 6.0


@dataclass(frozen=True)
class Strike:
    """Break the part ``name`` by ``fault`` at a time, and mend it ``lasts_s`` later."""

    at_s: float
    name: str
    fault: str
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  {self.fault:10} {self.name} for {self.lasts_s:.1f} s"


def plan(seed: int, seconds: float) -> Iterator[Strike]:
    """The strikes of a run; of each kind of part enough are well at any time, as far as one can know ahead."""
    draw = random.Random(seed)
    well_at_s: dict[str, float] = {}
    for number in range(1, int(seconds / EVERY_S)):
        at_s = number * EVERY_S
        kind = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        name = f"{kind}-{draw.randrange(_NUM[kind])}"
        fault = draw.choice(_WORKER_FAULTS if kind in ("prefill", "decode") else _PROCESS_FAULTS)
        lasts_s = draw.uniform(_LEAST_S, _MOST_S) if fault in _LASTING else draw.uniform(0, _LEAST_S)
        broken = [each for each, end_s in well_at_s.items() if each.startswith(kind) and end_s > at_s]
        if name in broken or len(broken) >= _NUM[kind] - _LEAST_WELL[kind]:
            continue
        well_at_s[name] = at_s + lasts_s + _RECOVERY_S
        yield Strike(at_s, name, fault, lasts_s)


class Chaos:
    """Performs a plan on ``pool``."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._parts = {part.name: part for part in pool.parts}
        self._under_way: dict[str, asyncio.Task[None]] = {}

    async def run(self, strikes: Iterator[Strike]) -> None:
        """Strike in time; one whose part, or too many of whose kind, have not come back yet is left out."""
        started_s = time.monotonic()
        for strike in strikes:
            await asyncio.sleep(max(0.0, started_s + strike.at_s - time.monotonic()))
            before = self._under_way.get(strike.name)
            if before is not None and not before.done():
                print(f"{strike}: left out, it has not come back yet", flush=True)
                continue
            if before is not None:
                before.result()
            kind = strike.name.partition("-")[0]
            broken = [name for name, task in self._under_way.items() if name.startswith(kind) and not task.done()]
            if len(broken) >= _NUM[kind] - _LEAST_WELL[kind]:
                print(f"{strike}: left out, {' and '.join(broken)} must come back first", flush=True)
                continue
            print(strike, flush=True)
            self._under_way[strike.name] = asyncio.create_task(self._perform(strike))

    async def mended(self) -> None:
        """Wait until all is mended."""
        await asyncio.gather(*self._under_way.values())

    async def _perform(self, strike: Strike) -> None:
        part = self._parts[strike.name]
        self._break(part, strike.fault)
        await asyncio.sleep(strike.lasts_s)
        match strike.fault:
            case "SIGSTOP":
                part.go_on()
            case "black hole":
                assert isinstance(part, Worker)
                part.path.heal()
            case "hang":
                part.kill()
                part.let_go()
        if strike.fault in ("SIGKILL", "SIGTERM", "hang"):
            code = await asyncio.to_thread(part.wait_ended)
            assert code == 0 or strike.fault != "SIGTERM", f"{part} ended with {code}\n{part.log()}"
            await asyncio.to_thread(part.start)

    def _break(self, part: Part, fault: str) -> None:
        match fault:
            case "SIGKILL":
                part.kill()
            case "SIGTERM":
                part.terminate()
            case "SIGSTOP":
                part.stop()
            case "hang":
                part.hang()
            case "cut" | "black hole":
                assert isinstance(part, Worker)
                part.path.cut() if fault == "cut" else part.path.black_hole()


class Leftovers:
    """What must be gone when all is idle again."""

    def __init__(self, pool: Pool, http: httpx.AsyncClient) -> None:
        self._pool = pool
        self._http = http
        self._fds: dict[str, int] = {}

    async def idle(self) -> None:
        """Wait until all workers are connected everywhere, nothing is under way and no block is in use."""
        await until(self._nothing_under_way, 120, what="nothing is under way")
        await self.all_connected()
        await until(self._no_blocks, 120, what="all blocks are free")

    def remember_descriptors(self) -> None:
        """Count what the parts of each kind have open now at the most: of several masters one has all the callers."""
        for part in self._pool.parts:
            self._fds[_kind(part)] = max(self._fds.get(_kind(part), 0), _num_fds(part))

    async def no_descriptors(self) -> None:
        """Wait until no part has many more open than before: one or two to each of the others may be there to stay."""
        slack = 3 * len(self._pool.parts)

        def more() -> dict[str, tuple[int, int]]:
            now = {part: (self._fds[_kind(part)], _num_fds(part)) for part in self._pool.parts}
            return {part.name: (before, num) for part, (before, num) in now.items() if num > before + slack}

        with contextlib.suppress(AssertionError):
            await until(lambda: not more(), 90)
        assert not more(), f"descriptors before and after: {more()}"

    async def no_chunks(self) -> None:
        """Have every chunk of the store read and compared."""
        command = [sys.executable, "-m", "tanghulu", "store", "check", "--master", self._pool.finder]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr

    async def all_connected(self) -> None:
        """Wait until every conductor is connected to every worker."""

        async def are() -> bool:
            wanted = {worker.id for worker in self._pool.workers}
            infos = await self._infos()
            return all({each["id"] for each in info["workers"] if each["connected"]} == wanted for info in infos)

        await until(are, 120, what="all workers are connected")

    async def _nothing_under_way(self) -> bool:
        return not any(info["num_requests"] for info in await self._infos())

    async def _infos(self) -> list[dict[str, Any]]:
        return [(await self._http.get(f"{each.url}/server_info")).json() for each in self._pool.conductors]

    async def _no_blocks(self) -> bool:
        for worker in self._pool.workers:
            text = (await self._http.get(worker.metrics_url)).text
            line = next(each for each in text.splitlines() if each.startswith("tanghulu_worker_blocks_in_use"))
            if float(line.rpartition(" ")[2]):
                return False
        return True


def _kind(part: Part) -> str:
    return part.name.partition("-")[0]


def _num_fds(part: Part) -> int:
    return len(os.listdir(f"/proc/{part.pid}/fd"))


async def run(
    pool: Pool, seed: int, seconds: float, num_clients: int = NUM_CLIENTS, asks: Sequence[Ask] = ASKS
) -> Load:
    """A whole run; raises AssertionError for anything that is lost, wrong or left over."""
    load = Load(lambda: pool.conductors, num_clients, asks)
    chaos = Chaos(pool)
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        leftovers = Leftovers(pool, http)
        await leftovers.idle()
        await load.begin()
        leftovers.remember_descriptors()
        try:
            await chaos.run(plan(seed, seconds))
            await chaos.mended()
        except BaseException:  # whatever it was, the clients end first; raised on
            await load.abandon()
            raise
        await load.end()
        print(dict(load.counts), flush=True)
        assert not load.lost, f"seed {seed}: {len(load.lost)} lost or wrong: {load.lost[:5]}"
        await leftovers.idle()
        await leftovers.no_descriptors()
        await leftovers.no_chunks()
    return load


def main() -> None:
    parser = argparse.ArgumentParser(description="Break a deployment under load, by a plan drawn from a seed.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--real", action="store_true", help="the real model in float32; give few --clients")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="th-chaos-"))
    print(f"seed {given.seed}, {given.seconds:g} s, logs in {folder}", flush=True)
    engine, timeout_s = (REAL, REAL_TIMEOUT_S) if given.real else ((), WORKER_TIMEOUT_S)
    asks = [replace(one, model="smollm2", max_tokens=one.max_tokens // 2) for one in ASKS] if given.real else ASKS
    with Pool(folder, engine=engine, timeout_s=timeout_s) as pool:
        load = asyncio.run(run(pool, given.seed, given.seconds, given.clients, asks))
    print(f"seed {given.seed}: {load.counts['answered']} answered, none lost, none wrong, nothing left over")


if __name__ == "__main__":
    main()
