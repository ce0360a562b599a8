"""A master or node of the soak: the production process, whose loop watch tells of each long stall what it was.

    python soak_server.py MODULE FLAGS...

Of each stall of more than 50 ms a line of JSON goes to the standard error: its length, the processor time that the
loop's thread used in it, and how long that thread, and the worst of the others, were ready to run and got no processor
(/proc/self/task/*/schedstat): a thread that waits so may hold the interpreter's lock meanwhile. At SIGUSR1 a node
writes a line for each lease: what it is on, and whose.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from tanghulu.runtime import process, stalls
from tanghulu.store.node.state.chunk_leases import ChunkLeases

MOST_STALL_S = 0.05


class Waits:
    """How long each thread of this process waited for a processor so far."""

    def __init__(self) -> None:
        self._own = str(threading.get_native_id())
        self._seconds = self._read()

    def _read(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in os.listdir("/proc/self/task"):
            try:
                found[name] = int(Path(f"/proc/self/task/{name}/schedstat").read_bytes().split()[1]) / 1e9
            except OSError:  # ended meanwhile
                continue
        return found

    def since(self) -> tuple[float, float]:
        """(of this thread, of that of the others that waited longest) since the last call."""
        before, self._seconds = self._seconds, self._read()
        grown = {name: seconds - before.get(name, 0.0) for name, seconds in self._seconds.items()}
        own = grown.pop(self._own)
        return own, max(grown.values(), default=0.0)


class TellingWatch(stalls.LoopWatch):
    """Says of each long stall where its time went."""

    def _set_timer(self) -> None:
        if not hasattr(self, "_waits"):
            self._waits, self._begun_s = Waits(), time.monotonic()
        self._waits.since()
        self._cpu_s = time.thread_time()
        super()._set_timer()

    def _tick(self) -> None:
        now_s, due_s = time.monotonic(), self._due_s
        if now_s - due_s > MOST_STALL_S:
            own_s, others_s = self._waits.since()
            seen = self._seen
            line = {
                "stall_s": round(now_s - due_s, 4),
                "cpu_s": round(time.thread_time() - self._cpu_s, 4),
                "waited_s": round(own_s, 4),
                "others_waited_s": round(others_s, 4),
                "age_s": round(now_s - self._begun_s, 1),
                "at": seen[1] if seen is not None and seen[0] == due_s else "",
            }
            print("STALL " + json.dumps(line), file=sys.stderr, flush=True)
        super()._tick()


def tell_leases(*_signal: object) -> None:
    """Write down who holds which lease, and in what state it is."""
    for leases in [each for each in gc.get_objects() if isinstance(each, ChunkLeases)]:
        for lease_id, chunk in leases.leases():
            lease = leases.lease(lease_id)
            session = None if lease is None else leases.access._sessions.get(lease.session_id)
            line = {"lease": repr(lease), "chunk": repr(chunk), "session": repr(session)}
            print("LEASE " + json.dumps(line), file=sys.stderr, flush=True)


def main() -> None:
    signal.signal(signal.SIGUSR1, tell_leases)
    stalls.LOGGED_S = MOST_STALL_S
    process.LoopWatch = TellingWatch  # type: ignore[misc]
    importlib.import_module(sys.argv.pop(1)).COMMAND()


if __name__ == "__main__":
    main()
