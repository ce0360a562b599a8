"""Many lives of a simulation, by hand: one seed after the other, and what failed."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable

from tanghulu.errors import TanghuluError


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all simulations have."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seeds", type=int, default=1000)
    made.add_argument("--first", type=int, default=0)
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin no seed after so long")
    return made


def live(module: str, args: argparse.Namespace, life: Callable[[int], Counter[str]]) -> int:
    """Have ``life`` lived for each seed, in a process whose sets of strings have one order; return how many failed."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is part of a life
        command = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    failed, counts, began_s = 0, Counter[str](), time.monotonic()
    num_done = 0
    for seed in range(args.first, args.first + args.seeds):
        if time.monotonic() - began_s > args.seconds:
            break
        num_done += 1
        try:
            counts += life(seed)
        except (AssertionError, TanghuluError) as error:
            failed += 1
            print(f"FAILED seed {seed}: {type(error).__name__}: {error}", flush=True)
        if num_done % 100 == 0:
            print(f"{num_done} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s", flush=True)
    print(f"{num_done} seeds, {failed} failed: {dict(counts.most_common())}")
    return failed
