"""How OpenMP's threads wait for each other, said before torch loads it; it reads this once."""

from __future__ import annotations

import os

#: Turns of libgomp's waiting loop before a thread sleeps: some 0.1 ms, as long as what lies between two products.
_SPINS = 10_000


def wait_shortly() -> None:
    """Let threads of this process look for work a moment, then sleep; unless the environment says otherwise.

    Threads that never sleep starve the worker beside them: a decode next to a prefill on two cores made 17 tokens/s
    with sleeping threads, and 5 with spinning ones. Threads that sleep at once are woken at every product of a decode.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
