"""Measure the fast lane's messages: how long it takes to pack and to unpack them, checks included, and their bytes.

    python -m benchmarks.store.codecs [--rounds 9] [--seed 1] [--beside OTHER/src]

Hot, in one process: the fastest of the rounds, as what else runs on the machine can only add to it. Packing starts
from the values that callers have, and unpacking ends with those that they take. With --beside the same is measured of
another checkout, in turns. Kept in results/codecs.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.report import keep
from tanghulu.rpc.wire import encode, parser_of
from tanghulu.store.protocol import messages as m
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import ClientCommit, CommitResult, NewChunk

Case = tuple[int, Callable[[], bytes], Callable[[bytes], object]]  # how often a round, packs, unpacks
NODE = "node-1-9f3c2a"


def values(seed: int) -> tuple[list[str], list[int]]:
    """Keys as engines make them, and numbers of 64 bits."""
    rng = random.Random(seed)
    keys = [f"kv/llama-3-8b/{rng.getrandbits(128):032x}/l12" for _ in range(1000)]
    return keys, [rng.getrandbits(64) for _ in range(1000)]


def cases(seed: int) -> dict[str, Case]:
    """Name -> case."""
    keys, words = values(seed)
    sums = Checksums(0, (words[0],))
    new = [NewChunk(key, word, 4096, Checksums(0, (word,))) for key, word in zip(keys[:64], words, strict=False)]
    said = [ClientCommit(NODE, 3, each.key, each.version, 4096) for each in new]
    found = [(word, 4096, (NODE, "node-2-000000"), 1) for word in words]

    def located(count: int) -> m.LocateReply:
        return m.LocateReply(False, [m.Location(*each) for each in found[:count]])

    def holders(body: bytes) -> object:
        reply = parser_of(m.LocateReply)(body)
        return [((), 0) if each is None else (each.node_ids, each.num_warm) for each in reply.locations]

    return {
        "PUT": (20000, lambda: encode(m.PutRequest(new[:1], True, 5000)), parser_of(m.PutRequest)),
        "PUT of 64": (500, lambda: encode(m.PutRequest(new, True, 5000)), parser_of(m.PutRequest)),
        "PUT, reply": (20000, lambda: encode(m.PutReply.of([False])), lambda body: parser_of(m.PutReply)(body).results),
        "RESERVE": (20000, lambda: encode(m.ReserveRequest(new[:1], 5000)), parser_of(m.ReserveRequest)),
        "RESERVE, reply": (
            20000,
            lambda: encode(m.ReserveReply([m.Reservation(words[1], 1 << 30, False)])),
            parser_of(m.ReserveReply),
        ),
        "COMMIT": (
            20000,
            lambda: encode(m.CommitRequest([m.CommitItem(words[1], sums)], [], True, 5000)),
            parser_of(m.CommitRequest),
        ),
        "GET": (20000, lambda: encode(m.GetRequest(keys[:1], 65536)), parser_of(m.GetRequest)),
        "GET, reply": (
            20000,
            lambda: encode(m.GetReply([m.Found(4096, words[1], sums, 0, 0, False)], 5000)),
            parser_of(m.GetReply),
        ),
        "UNPIN": (20000, lambda: encode(m.UnpinRequest([words[1]], 4096)), parser_of(m.UnpinRequest)),
        "LOCATE": (20000, lambda: encode(m.LocateRequest(keys[:1], False)), parser_of(m.LocateRequest)),
        "LOCATE, reply": (20000, lambda: encode(located(1)), holders),
        "LOCATE of 1000": (1000, lambda: encode(m.LocateRequest(keys, False)), parser_of(m.LocateRequest)),
        "LOCATE of 1000, reply": (100, lambda: encode(located(1000)), holders),
        "EXISTS of 1000, reply": (
            5000,
            lambda: encode(m.LocateReply(False, found=bytes([1]) * 1000)),
            lambda body: parser_of(m.LocateReply)(body).existence,
        ),
        "COMMIT_KEYS of 1": (20000, lambda: encode(m.CommitKeysRequest(said[:1])), parser_of(m.CommitKeysRequest)),
        "COMMIT_KEYS, reply": (
            20000,
            lambda: encode(m.CommitKeysReply([CommitResult.ACCEPTED])),
            parser_of(m.CommitKeysReply),
        ),
        "COMMIT_KEYS of 64": (500, lambda: encode(m.CommitKeysRequest(said)), parser_of(m.CommitKeysRequest)),
    }


def took_us(call: Callable[[], object], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count * 1e6


def measure(seed: int) -> dict[str, tuple[float, float, int]]:
    """Of each message of the tree that is imported: us to pack, us to unpack, bytes."""
    measured = {}
    for name, (count, pack, unpack) in cases(seed).items():
        body = pack()
        measured[name] = (
            took_us(pack, count),
            took_us(lambda unpack=unpack, body=body: unpack(body), count),
            len(body),
        )
    return measured


def measure_at(tree: str, seed: int) -> dict[str, tuple[float, float, int]]:
    """The same in a process of its own that imports ``tree``; "" is this one's."""
    environment = {**os.environ, **({"PYTHONPATH": tree} if tree else {})}
    command = [sys.executable, "-m", "benchmarks.store.codecs", "--inside", "--seed", str(seed)]
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return {name: (row[0], row[1], row[2]) for name, row in json.loads(answer).items()}


def best_of(rounds: list[dict[str, tuple[float, float, int]]], name: str) -> tuple[float, float, int]:
    return min(each[name][0] for each in rounds), min(each[name][1] for each in rounds), rounds[0][name][2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--beside", default="", help="src of another checkout")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.seed)))
        return
    trees = {"here": "", **({"beside": options.beside} if options.beside else {})}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            rounds[name].append(measure_at(tree, options.seed))
    rows: list[dict[str, Any]] = []
    table = Table("message", *(f"{what}, {name}" for what in ("pack us", "unpack us", "bytes") for name in trees))
    for message in rounds["here"][0]:
        best = {name: best_of(rounds[name], message) for name in trees}
        rows.append({"message": message})
        for at, what in enumerate(("pack_us", "unpack_us", "num_bytes")):
            rows[-1] |= {f"{what}_{name}": round(best[name][at], 2) for name in trees}
        table.add_row(*(str(value) for value in rows[-1].values()))
    Console(width=140).print(table)
    print(keep("codecs", rows, seed=options.seed))


if __name__ == "__main__":
    main()
