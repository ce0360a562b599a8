"""How long streams stand still when the worker that computes them is killed, or its engine hangs.

    python -m benchmarks.conductor.fault_pauses [--rounds 8] [--streams 8] [--timeout-s 3]

A standing cluster of mock workers (two prefill, two decode, `tests.e2e.faults`), and in each round as many streams as
given, half of them at each decode worker. When every stream has brought a few tokens, the first of the two breaks; it
is whole again before the next round. A stream's pause is its longest time between two events. Streams of the other
worker, in the same rounds, say what a pause without a fault is. Every answer must be whole.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.common import report
from tests.e2e.faults.asking import Ask
from tests.e2e.faults.parts import Worker
from tests.e2e.faults.standing import MOVES, Client, Standing, connected, until

FAULTS = ("SIGKILL", "hung engine")
NUM_TOKENS, EARLY_TOKENS = 200, 10


class Stream:
    """One streamed completion, at first at ``worker``, and when its events came."""

    def __init__(self, client: Client, number: int, salt: str, worker: Worker) -> None:
        self._client, self.worker = client, worker
        asked = Ask("/v1/completions", stream=True, greedy=True, number=number, max_tokens=NUM_TOKENS)
        self._body = asked.body(salt, {"decode_worker": worker.id})
        self.times_s: list[float] = []
        self.text = ""

    async def read(self) -> None:
        """Ask and read to the end; raises AssertionError unless the answer ended as it must."""
        url = self._client.cluster.conductors[MOVES].url + "/v1/completions"
        async with self._client.http.stream("POST", url, json=self._body) as reply:
            assert reply.status_code == 200, reply
            async for line in reply.aiter_lines():
                if line:
                    self.times_s.append(time.perf_counter())
                    self.text += line
        assert self.text.count('"length"') == 1, self.text[-500:]
        assert self.text.count("[DONE]") == 1, self.text[-500:]

    @property
    def pause_s(self) -> float:
        return max(later - before for before, later in zip(self.times_s, self.times_s[1:], strict=False))


async def one_round(client: Client, fault: str, salt: str, num_streams: int) -> tuple[list[float], list[float]]:
    """The pauses of the streams whose worker broke, and of the others."""
    workers = client.cluster.decode
    streams = [Stream(client, number, salt, workers[number % len(workers)]) for number in range(num_streams)]
    reading = asyncio.gather(*(stream.read() for stream in streams))

    def all_under_way() -> bool:
        return all(len(stream.times_s) > EARLY_TOKENS for stream in streams)

    await until(all_under_way, what="all streams are in the middle")
    workers[0].suffer(fault)
    await reading
    await asyncio.to_thread(workers[0].recover, fault)
    await until(client.is_whole, what="the worker is back")
    moved = [stream.pause_s for stream in streams if stream.worker is workers[0]]
    return moved, [stream.pause_s for stream in streams if stream.worker is not workers[0]]


async def run(cluster: Standing, num_rounds: int, num_streams: int) -> None:
    moved: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    others: dict[str, list[float]] = {fault: [] for fault in FAULTS}
    async with connected(cluster) as client:
        for number in range(num_rounds):
            for fault in FAULTS:
                pauses_s, undisturbed_s = await one_round(client, fault, f"{fault}-{number}", num_streams)
                moved[fault] += pauses_s
                others[fault] += undisturbed_s
    for fault in FAULTS:
        for whose, pauses_s in (("its streams", moved[fault]), ("the others", others[fault])):
            if pauses_s:
                p50_ms, most_ms = statistics.median(pauses_s) * 1e3, max(pauses_s) * 1e3
                print(f"{fault:12} {whose:12} {len(pauses_s):4} pauses: p50 {p50_ms:7.0f} ms, most {most_ms:7.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--timeout-s", type=int, default=3, help="of the conductor: a hung engine is lost after it")
    given = parser.parse_args()
    print(report.machine())
    with tempfile.TemporaryDirectory(prefix="th-pauses-") as folder:
        cluster = Standing(Path(folder), limits=(MOVES,), timeout_s=given.timeout_s)
        with cluster.running:
            asyncio.run(run(cluster, given.rounds, given.streams))


if __name__ == "__main__":
    main()
