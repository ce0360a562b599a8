"""Starts that cannot succeed: one clear line, an exit code, no traceback, nothing tried again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tanghulu.cli.children import ChildProcess

KUBERNETES = {
    "TANGHULU_SERVICE_HOST": "10.0.0.1",
    "TANGHULU_MASTER_SERVICE_HOST": "10.0.0.1",
    "TANGHULU_MASTER_SERVICE_PORT_STORE": "7400",
    "TANGHULU_PORT": "tcp://10.0.0.1:7400",
    "TANGHULU_MASTER_PORT": "tcp://10.0.0.1:7400",
    "TANGHULU_MASTER_PORT_7400_TCP_ADDR": "10.0.0.1",
}
UP = ("up", "--engine", "mock", "--model", "mock", "--state-dir", "{folder}/state")
#: (words, exit code, what the one line says); {folder} is empty, {file} a file, {port} a port that is taken.
STARTS = {
    "an unknown eviction policy": ((*UP, "--eviction", "foo"), 2, "'foo' is not one of 'lru'"),
    "a port of the master that is taken": (
        (*UP, "--master-port", "{port}", "--port", "0"),
        1,
        "cannot listen on 127.0.0.1:{port}: Address already in use; choose another --master-port; see ",
    ),
    "a port of the conductor that is taken": (
        (*UP, "--master-port", "0", "--port", "{port}"),
        1,
        "cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port; see ",
    ),
    "a port that is taken": (
        ("master", "--port", "{port}"),
        1,
        "{port}: Address already in use; choose another --port",
    ),
    "a directory that cannot be": ((*UP[:-1], "/proc/nope"), 7, "--state-dir /proc/nope cannot be used"),
    "a file for a directory": ((*UP[:-1], "{file}"), 7, "--state-dir {file} cannot be used"),
    "more memory than there is": ((*UP, "--node-memory", "999TiB"), 7, "request less"),
    "an address without its scheme": (("chat", "--url", "127.0.0.1:1"), 7, "use --url http://127.0.0.1:1"),
    "nobody at the address": (
        ("chat", "--url", "http://127.0.0.1:1/v1", "--message", "x"),
        4,
        "no model answers at http://127.0.0.1:1/v1: [Errno 111] Connection refused; is `tanghulu up` running?",
    ),
    "no master": (("store", "nodes", "--master", "127.0.0.1:1"), 4, "no master answered at 127.0.0.1:1"),
    "no master to ask for an instance": (("drain", "x", "--master", "127.0.0.1:1"), 4, "Connection refused"),
    "no master to ask for the cluster": (("status", "--master", "127.0.0.1:1"), 4, "Connection refused"),
    "an address that does not answer": (
        ("bench", "http", "--url", "http://127.0.0.1:{port}"),
        4,
        "no model answers at http://127.0.0.1:{port}",
    ),
    "no model": (
        ("up", "--model", "/no/such/model", "--master-port", "0", "--port", "0", "--state-dir", "{folder}/state"),
        1,
        "/no/such/model",
    ),
    "a table of pools with another name": (("router", "--pools", "{file}"), 1, "'pools'"),
}


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_start_that_cannot_succeed(name: str, tmp_path: Path, taken: int) -> None:
    file = tmp_path / "file"
    file.write_text("[[pools]]\nname = 'a'\n")
    words, code, said = STARTS[name]

    def filled(text: str) -> str:
        return text.format(folder=tmp_path, file=file, port=taken)

    command = [sys.executable, "-W", "error", "-m", "tanghulu", *map(filled, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert filled(said) in done.stderr.splitlines()[-1]
    assert "restarted" not in done.stderr + done.stdout


@pytest.mark.slow
def test_variables_of_a_service_in_kubernetes_change_nothing() -> None:
    command = [sys.executable, "-m", "tanghulu", "store", "nodes", "--master", "127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | KUBERNETES)
    assert done.returncode == 4
    assert "no master answered at 127.0.0.1:1" in done.stderr


def test_the_last_words_of_a_child(tmp_path: Path) -> None:
    child = ChildProcess("node", "node-0", [], tmp_path / "node-0.log", tmp_path)
    assert child.last_words() == ""
    for text, last in (
        ("one\ntwo\n\n", "two"),
        ('{"event": "process.ready"}\n', "process.ready"),
        ('{"event": "process.failed", "error": "no memory"}\n', "no memory"),
        ("x" * 10000 + "\nImportError: no module\n", "ImportError: no module"),
        ("", ""),
        ("7\n", "7"),
    ):
        child.log_path.write_text(text)
        assert child.last_words() == last
