"""What another host reaches of a cluster: it stands in a network, process and IPC namespace of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tanghulu.auth.api_keys import new_key
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.cli import keys
from tests.e2e.cluster import LiveCluster, eventually, running_cluster
from tests.netns.wires import Wires
from tests.tls_files import Authority

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
HOST, GATEWAY_PORT = "10.77.0.2", 7480
MOCK = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=1000", "--node-memory", "64MiB")
TENANTS = ("acme", "initech")


class Strangers:
    """A cluster at the owner's end of the wires, and calls from the other end."""

    def __init__(self, wires: Wires, cluster: LiveCluster) -> None:
        self.wires, self.cluster = wires, cluster

    def tried(self, *calls: tuple[Any, ...]) -> list[Any]:
        """What came of each (function of the stranger, arguments, named arguments), from the other host."""
        namespaces = ("unshare", "--pid", "--fork", "--mount-proc", "--ipc")
        command = ("ip", "netns", "exec", self.wires.client, *namespaces, sys.executable, "-m", "tests.netns.stranger")
        whole = [(*call, {}) if len(call) == 2 else call for call in calls]
        done = subprocess.run(
            command, input=json.dumps(whole), capture_output=True, text=True, timeout=300, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout)
        return found

    def processes(self) -> list[psutil.Process]:
        parent = psutil.Process(self.cluster.process.pid)
        return [parent, *parent.children(recursive=True)]


def _running(wires: Wires, folder: str, *flags: str) -> Any:
    # Where a path of a Unix socket is short enough.
    program = ("ip", "netns", "exec", wires.owner, sys.executable, "-m", "tanghulu")
    return running_cluster(Path(folder) / "state", *MOCK, *flags, program=program)


@pytest.fixture(scope="module")
def plain(wires: Wires) -> Iterator[Strangers]:
    with tempfile.TemporaryDirectory(prefix="th-", dir="/tmp") as folder, _running(wires, folder) as cluster:
        yield Strangers(wires, cluster)


@pytest.fixture(scope="module")
def secure(wires: Wires) -> Iterator[Strangers]:
    flags = ("--secure", "--host", HOST, "--store-http-port", str(GATEWAY_PORT))
    with tempfile.TemporaryDirectory(prefix="th-", dir="/tmp") as folder, _running(wires, folder, *flags) as cluster:
        yield Strangers(wires, cluster)


def _rows(strangers: Strangers, family: str, wanted: Any) -> list[list[str]]:
    """The rows, as words, of the cluster's network namespace, in which nobody else lives."""
    rows = Path(f"/proc/{strangers.cluster.process.pid}/net/{family}").read_text().splitlines()[1:]
    return [words for words in (row.split() for row in rows) if wanted(words)]


def test_a_cluster_on_loopback_is_out_of_reach(plain: Strangers) -> None:
    listening = _rows(plain, "tcp", lambda words: words[3] == "0A")
    ports = {f"127.0.0.1:{int(words[1].rpartition(':')[2], 16)}" for words in listening}
    assert ports >= {entry["address"] for entry in plain.cluster.entries()}
    ports |= {f"{HOST}:{address.rpartition(':')[2]}" for address in ports}
    # The kernel shows an abstract name with @ instead of the zero byte that it begins with.
    sockets = {words[7] for words in _rows(plain, "unix", lambda words: words[7:8] and words[7][0] == "@")}
    assert sockets, "nodes have an abstract one"
    calls = [*(("tcp", [each]) for each in sorted(ports)), *(("unix", [each]) for each in sorted(sockets))]
    assert "connected" not in plain.tried(*calls)
    pids = [process.pid for process in plain.processes()]
    assert any("memfd" in os.readlink(each) for pid in pids for each in Path(f"/proc/{pid}/fd").iterdir())
    assert plain.tried(("memory", [[pid for pid in pids if pid > 64]])) == [[]]


def test_a_client_with_a_foreign_authority_is_refused(secure: Strangers, tmp_path: Path) -> None:
    folder = secure.cluster.state_dir / "secure"
    authority = Authority(tmp_path / "foreign")
    cert, key = authority.sign("client")
    certs = {name: str(folder / "certs" / file) for name, file in FILES.items()}
    shown = {"ca": certs["ca"], "cert": cert, "key": key}  # trusts the cluster; not the other way round
    trusts = {"ca": authority.ca}  # for the pages that ask for no certificate: these are not trusted
    cluster, token = secure.cluster, (folder / "operator.token").read_text().strip()
    workers = [entry["address"] for entry in cluster.entries() if entry["role"] in ("prefill", "decode")]
    metrics = [entry["metrics_address"] for entry in cluster.entries() if entry["role"] not in ("conductor", "gateway")]
    bearer = {"authorization": f"Bearer {token}"}
    pages = [f"https://{cluster.entry('conductor')['address']}/live", f"https://{HOST}:{GATEWAY_PORT}/health"]
    assert len(workers) == 2
    assert len(metrics) >= 4
    calls: list[tuple[Any, ...]] = [("nodes", [cluster.master, token, shown])]
    calls += [("describe", [each, shown, token]) for each in workers]
    calls += [("get", [f"https://{each}/metrics", shown], bearer) for each in metrics]
    calls += [("get", [page, trusts]) for page in pages]
    refused = secure.tried(*calls)
    assert refused[0] in ("MasterUnavailable", "Unauthorized")
    assert set(refused[1:3]) <= {"NODE_UNAVAILABLE", "UNAUTHORIZED"}
    assert {name for name, _ in refused[3 : 3 + len(metrics)]} <= {"ReadError", "ConnectError", "RemoteProtocolError"}
    assert refused[-2:] == [["ConnectError", ""]] * 2
    # With the cluster's own, each of these doors opens: it is the authority that was refused.
    ours: list[tuple[Any, ...]] = [("nodes", [cluster.master, token, certs])]
    ours += [("describe", [each, certs, token]) for each in workers]
    ours += [("get", [f"https://{each}/metrics", certs], bearer) for each in metrics]
    ours += [("get", [page, certs]) for page in pages]
    let_in = secure.tried(*ours)
    assert let_in[:3] == ["1 nodes", "described", "described"]
    assert {status for status, _ in let_in[3:]} == {200}


def test_a_tenant_on_another_host_sees_no_other_tenant(secure: Strangers) -> None:
    folder = secure.cluster.state_dir / "secure"
    certs = {name: str(folder / "certs" / file) for name, file in FILES.items()}
    with (folder / "tokens.toml").open("a") as tokens:
        for name in TENANTS:
            tokens.write(f'[tenants.{name}]\n[[tokens]]\nname = "{name}"\ntenant = "{name}"\n')
            tokens.write(f'rights = ["read", "write"]\nsha256 = "{hash_of("secret-" + name)}"\n')
    key = new_key()
    keys.add(folder / "keys.toml", "acme", key, ("inference",))
    acme, user = {"authorization": "Bearer secret-acme"}, {"authorization": f"Bearer {key}"}
    gateway, conductor = f"https://{HOST}:{GATEWAY_PORT}", f"https://{secure.cluster.entry('conductor')['address']}"

    def known() -> bool:
        found = secure.tried(
            ("get", [f"{gateway}/dashboard/state", certs], acme), ("get", [f"{conductor}/v1/models", certs], user)
        )
        return [status for status, _ in found] == [200, 200] and "tenants" in found[0][1]

    eventually(known, 60, "the new token and the new key are known")
    metrics = [entry["metrics_address"] for entry in secure.cluster.entries()]
    for shown, status in ((acme, {401, 403}), ({}, {401})):
        found = secure.tried(*(("get", [f"https://{each}/metrics", certs], shown) for each in metrics))
        assert {each for each, _ in found} <= status, found
    (_, state), (_, tenants) = secure.tried(
        ("get", [f"{gateway}/dashboard/state", certs], acme), ("get", [f"{gateway}/v1/tenants", certs], acme)
    )
    assert {row["tenant"] for row in state["tenants"]} == {row["tenant"] for row in tenants} == {"acme"}
    assert not {"traffic", "evictions_by"} & state.keys()
    pages = [f"{conductor}/dashboard", f"{conductor}/dashboard/state", f"{conductor}/metrics"]
    assert [each for each, _ in secure.tried(*(("get", [page, certs], user) for page in pages))] == [403] * 3
    pages += [f"{gateway}/dashboard", f"{gateway}/dashboard/state", f"{gateway}/v1/nodes"]
    assert [each for each, _ in secure.tried(*(("get", [page, certs]) for page in pages))] == [401] * 6


FILES = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
