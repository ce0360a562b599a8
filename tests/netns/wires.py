"""Two network namespaces joined by three shaped veth pairs, and the client process in one of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from typing import Any

NUM_LINKS = 3


def run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


class Wires:
    """The namespaces and their links; device ``cN`` at the client's end, ``oN`` at the owner's."""

    def __init__(self) -> None:
        self.owner, self.client = f"tho{os.getpid()}", f"thc{os.getpid()}"

    def build(self) -> None:
        for name in (self.owner, self.client):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for number in range(NUM_LINKS):
            ends = ((self.client, f"c{number}", 1), (self.owner, f"o{number}", 2))
            run("ip", "-n", self.client, "link", "add", f"c{number}", "type", "veth",
                "peer", "name", f"o{number}", "netns", self.owner)  # fmt: skip
            for namespace, device, host in ends:
                run("ip", "-n", namespace, "address", "add", f"10.77.{number}.{host}/24", "dev", device)
                run("ip", "-n", namespace, "link", "set", device, "up")

        for number in range(NUM_LINKS):
            self._wait_until_up(self.owner, f"o{number}")
            self._wait_until_up(self.client, f"c{number}")

    def _wait_until_up(self, namespace: str, device: str) -> None:
        """The kernel says so a moment after both ends were set up."""
        until_s = time.monotonic() + 30
        while "state UP" not in run("ip", "-n", namespace, "link", "show", device):
            assert time.monotonic() < until_s, f"{device} does not come up"

    def shape(self, *rates_mbit_s: int) -> None:
        """Let each link carry so much, in both directions."""
        for number, rate in enumerate(rates_mbit_s):
            for namespace, device in ((self.client, f"c{number}"), (self.owner, f"o{number}")):
                run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf",
                    "rate", f"{rate}mbit", "burst", "256kb", "latency", "40ms")  # fmt: skip

    def link(self, number: int, state: str) -> None:
        """``up`` or ``down``, at the client's end."""
        run("ip", "-n", self.client, "link", "set", f"c{number}", state)

    def remove(self) -> None:
        for name in (self.owner, self.client):
            subprocess.run(("ip", "netns", "delete", name), check=False, capture_output=True, timeout=20)


class RemoteClient:
    """The client process; methods of ``client.Client`` by name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.hear() == "ready"

    def say(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client process has ended"
        return json.loads(line)

    def do(self, *command: Any) -> Any:
        self.say(*command)
        return self.hear()


def missing() -> str:
    """Why there can be no namespaces here, or nothing."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        return "needs root, ip and tc (apt-get install iproute2)"
    wires = Wires()
    try:
        wires.build()
        wires.shape(100, 100, 100)
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces, veth and tbf: {error.stderr.strip()}"
    finally:
        wires.remove()
    return ""
