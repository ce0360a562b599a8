"""Ports for processes under test that are told theirs, or that have to come back at the one they had."""

from __future__ import annotations

import itertools
import random
import socket

#: Below the ports that Linux hands out by itself (32768 and up): who merely connects somewhere, as everybody does all
#: the time, takes none of these meanwhile, and who knocks where a process is away does not get connected to itself.
_PORTS = range(12_000, 32_000)
#: Processes that test side by side begin in different places.
_places = itertools.count(random.SystemRandom().randrange(len(_PORTS)))


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on, and that this process has not been given before."""
    while True:
        port = _PORTS[next(_places) % len(_PORTS)]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
