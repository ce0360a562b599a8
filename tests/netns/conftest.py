"""An owner in one network namespace and a client in another, as fixtures."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.netns.wires import RemoteClient, Wires, missing

ROOT = Path(__file__).parents[2]
SEGMENT_BYTES = 128 << 20


@pytest.fixture(scope="module")
def wires() -> Iterator[Wires]:
    reason = missing()
    if reason:
        pytest.skip(f"hardware: {reason}")
    wires = Wires()
    try:
        wires.build()
        yield wires
    finally:
        wires.remove()


@pytest.fixture(scope="module")
def client(wires: Wires) -> Iterator[RemoteClient]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    owner_command = (sys.executable, "-m", "tests.netns.owner", str(SEGMENT_BYTES))
    with subprocess.Popen(("ip", "netns", "exec", wires.owner, *owner_command), **pipes) as owner:
        assert owner.stdout is not None
        descriptor = owner.stdout.readline().strip()
        client_command = (sys.executable, "-m", "tests.netns.client", descriptor, str(SEGMENT_BYTES))
        with subprocess.Popen(("ip", "netns", "exec", wires.client, *client_command), **pipes) as process:
            client = RemoteClient(process)
            client.do("open", ["c0", "c1", "c2"])  # the links are not shaped yet
            assert client.do("move", "WRITE", SEGMENT_BYTES >> 20)["right"]
            yield client
            assert process.stdin is not None
            process.stdin.close()
        assert owner.stdin is not None
        owner.stdin.close()
