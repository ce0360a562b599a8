"""`tanghulu up --secure` from another process: without keys every door is shut, with them all works, hand-overs too."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import psutil
import pytest

from tanghulu.auth.api_keys import new_key
from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.cli import keys
from tanghulu.conductor import route_rights
from tanghulu.conductor.peers.wire import FOLLOW, FollowRequest
from tanghulu.errors import NodeUnavailable, Unauthorized
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.greeting import greet_blocking
from tanghulu.rpc.methods import END, HELLO, PROTOCOL_VERSION, EndRequest, HelloRequest, Method
from tanghulu.session.messages import (
    DESCRIBE,
    DROP_CACHE,
    PROBE,
    SESSION,
    Abort,
    DescribeRequest,
    DropCacheRequest,
    ProbeRequest,
    SessionHello,
    Submit,
    ToWorker,
)
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import Address, RequestId
from tanghulu.web.access import Need
from tanghulu.workers.kv.peer_methods import (
    EXPORT_PIN,
    EXPORT_RELEASE,
    PREFIX_PIN,
    ExportPinRequest,
    ExportReleaseRequest,
    PrefixPinRequest,
)
from tests.e2e.cluster import LiveCluster, eventually, running_cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
ASK = {"prompt": "Once upon a time " * 60, "max_tokens": 8, "temperature": 0}


class Secure:
    """A cluster that was started with --secure, and its files."""

    def __init__(self, cluster: LiveCluster) -> None:
        self.cluster = cluster
        self.folder = cluster.state_dir / "secure"
        certs = self.folder / "certs"
        self.tls = TlsFiles(str(certs / "client.pem"), str(certs / "client.key"), str(certs / "ca.pem"))
        self.secrets = {
            name: (self.folder / name).read_text().strip() for name in ("api.key", "operator.token", "cluster.token")
        }
        self.url = cluster.url.replace("http://", "https://")
        self.http = httpx.Client(base_url=self.url, verify=client_context(self.tls), trust_env=False, timeout=60)

    @property
    def key(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secrets['api.key']}"}

    def processes(self, *roles: str) -> list[dict[str, Any]]:
        return [entry for entry in self.cluster.entries() if not roles or entry["role"] in roles]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    flags = ("--secure", "--engine", "mock", "--debug", "mock_speedup=1000", "--node-memory", "64MiB")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANGHULU_TRANSPORTS", "tcp")  # KV is read through TLS, and not out of shared memory
        with running_cluster(tmp_path_factory.mktemp("secure"), *flags) as cluster:
            made = Secure(cluster)
            yield made
            made.http.close()


def test_no_http_route_answers_without_a_key(secure: Secure) -> None:
    for path, need in route_rights.CONDUCTOR.table.items():
        answer = secure.http.get(path.replace("{name:path}", "x"))
        assert answer.status_code == (200 if need is Need.NOTHING else 401), path
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{secure.url.removeprefix('https://')}/live", trust_env=False)


def test_metrics_are_for_those_who_may_see_them(secure: Secure) -> None:
    assert {entry["role"] for entry in secure.processes()} >= {"master", "node", "prefill", "decode", "conductor"}
    for entry in secure.processes():
        url = f"https://{entry['metrics_address']}/metrics"
        assert secure.http.get(url).status_code == 401, entry
        assert secure.http.get(url, headers={"authorization": "Bearer wrong"}).status_code == 401, entry
        for secret in ("operator.token", "cluster.token"):
            shown = {"authorization": f"Bearer {secure.secrets[secret]}"}
            assert "tanghulu_build_info" in secure.http.get(url, headers=shown).text
        if entry["role"] != "conductor":
            with httpx.Client(verify=client_context(TlsFiles(ca=secure.tls.ca)), trust_env=False) as uncertified:
                assert uncertified.get(url, headers=shown).status_code == 403
                assert uncertified.get(url.replace("/metrics", "/live")).status_code == 200
    conductor = secure.processes("conductor")[0]
    assert secure.http.get(f"https://{conductor['metrics_address']}/metrics", headers=secure.key).status_code == 200


def test_workers_let_in_nobody_without_a_token(secure: Secure) -> None:
    calls: list[tuple[Method[Any, Any], Any]] = [
        (DESCRIBE, DescribeRequest()),
        (PROBE, ProbeRequest(1)),
        (DROP_CACHE, DropCacheRequest()),
        (END, EndRequest()),
    ]
    for entry in secure.processes("prefill", "decode"):
        address = Address.parse(entry["address"])
        for method, request in calls:
            with pytest.raises(Unauthorized):
                _ask(address, method, request, secure.tls)
        with pytest.raises(Unauthorized):
            greet_blocking(FastConnection(address, tls=secure.tls), Credentials(token="wrong"), 10)
        for tls in (TlsFiles(ca=secure.tls.ca), TlsFiles()):  # no certificate, no connection
            with pytest.raises((NodeUnavailable, Unauthorized)):
                _ask(address, DESCRIBE, DescribeRequest(), tls)


def test_nobody_opens_a_session_or_reads_kv_without_a_token(secure: Secure) -> None:
    name = RequestId("x")
    submit = Submit(name, bytes(8), 2, Sampling(), StopRule(1))
    requests: list[tuple[Method[Any, Any], Any]] = [
        (EXPORT_PIN, ExportPinRequest(1)),
        (PREFIX_PIN, PrefixPinRequest(())),
        (EXPORT_RELEASE, ExportReleaseRequest(1)),
        (SESSION, ToWorker(SessionHello("x", 1))),
        (SESSION, ToWorker(submit)),
        (SESSION, ToWorker(Abort(name))),
    ]
    for entry in secure.processes("prefill", "decode"):
        address = Address.parse(entry["address"])
        for method, request in requests:
            connection = FastConnection(address, tls=secure.tls)
            with pytest.raises(Unauthorized):
                connection.call(method.number, request, method.reply, deadline_s=10)
            connection.close()
        for token in ("", "wrong"):
            connection = FastConnection(address, tls=secure.tls)
            shown = HelloRequest(PROTOCOL_VERSION, token=token)
            with pytest.raises(Unauthorized):
                connection.call(HELLO.number, shown, HELLO.reply, deadline_s=10)
            connection.close()
        with pytest.raises((NodeUnavailable, Unauthorized)):
            _ask(address, EXPORT_PIN, ExportPinRequest(1), TlsFiles())


def test_conductors_tell_nobody_without_a_token(secure: Secure) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tanghulu", "status", "--json", *_operator(secure)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr + found.stdout
    parts = json.loads(found.stdout)["parts"]
    assert {part["health"] for part in parts} == {"up"}
    ports = {
        connection.laddr.port
        for connection in psutil.Process(secure.processes("conductor")[0]["pid"]).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    own = {
        int(address.rpartition(":")[2])
        for entry in secure.processes("conductor")
        for address in (entry["address"], entry["metrics_address"])
    }
    (peer_port,) = ports - own
    address = Address("127.0.0.1", peer_port)
    with closing(FastConnection(address, tls=secure.tls)) as stranger:
        for call in (FOLLOW.call(FollowRequest()), END.call(EndRequest())):
            with pytest.raises(Unauthorized):
                stranger.call(call.method, call.request, call.reply_type, deadline_s=10)
    with pytest.raises(Unauthorized):
        greet_blocking(FastConnection(address, tls=secure.tls), Credentials("", "wrong"), 10)


def test_with_the_key_all_works_and_kv_is_handed_over(secure: Secure) -> None:
    def completed() -> dict[str, Any]:
        answer = secure.http.post("/v1/completions", json=ASK, headers=secure.key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert completed()["usage"]["completion_tokens"] == 8
    assert completed()["choices"][0]["text"]
    operator = {"authorization": f"Bearer {secure.secrets['operator.token']}"}
    prefill, decode = secure.processes("prefill")[0], secure.processes("decode")[0]

    def metric(entry: dict[str, Any], name: str) -> float:
        lines = secure.http.get(f"https://{entry['metrics_address']}/metrics", headers=operator).text.splitlines()
        return sum(
            float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and not line.startswith("#")
        )

    assert eventually(lambda: metric(prefill, "tanghulu_worker_export_bytes_total"), what="KV was read by the decoder")
    assert metric(decode, "tanghulu_worker_generated_tokens_total") > 0
    context: ssl.SSLContext = client_context(TlsFiles(ca=secure.tls.ca))
    with httpx.Client(base_url=secure.url, verify=context, trust_env=False) as user:  # users need no certificate
        assert user.get("/v1/models", headers=secure.key).status_code == 200
        assert user.get("/dashboard/state", headers=secure.key).json()["silent"] == []
    chat = [sys.executable, "-m", "tanghulu", "chat", "--url", secure.url, "--message", "hello", "--max-tokens", "4"]
    said = subprocess.run(
        [*chat, "--api-key", f"@{secure.folder / 'api.key'}", "--tls-ca", secure.tls.ca], capture_output=True, text=True
    )
    assert said.returncode == 0, said.stderr
    said = subprocess.run([*chat, "--tls-ca", secure.tls.ca], capture_output=True, text=True)
    assert (said.returncode, "requires an API key" in said.stderr) == (8, True)


def test_a_key_that_is_made_later_works_until_it_is_revoked(secure: Secure) -> None:
    file, made = secure.folder / "keys.toml", new_key()
    keys.add(file, "late", made, ("inference",))
    shown = {"authorization": f"Bearer {made}"}
    eventually(lambda: secure.http.get("/v1/models", headers=shown).status_code == 200, what="the key is known")
    assert keys.COMMAND.main(["revoke", str(file), "late"], standalone_mode=False) is None
    eventually(lambda: secure.http.get("/v1/models", headers=shown).status_code == 401, what="the key is revoked")


def test_no_secret_is_in_logs_in_ps_or_in_the_state(secure: Secure) -> None:
    parent = psutil.Process(secure.cluster.process.pid)
    seen = [" ".join(process.cmdline()) for process in (parent, *parent.children(recursive=True))]
    seen += [path.read_text() for path in secure.cluster.state_dir.iterdir() if path.is_file()]
    for name, secret in secure.secrets.items():
        assert len(secret) > 30
        assert not any(secret in text for text in seen), name
    for path in secure.folder.rglob("*"):
        if path.is_file() and path.suffix in (".key", ".token", ".toml"):
            assert path.stat().st_mode & 0o077 == 0, path


def _ask(address: Address, method: Method[Any, Any], request: Any, tls: TlsFiles) -> None:
    with closing(FastConnection(address, tls=tls)) as connection:
        connection.call(method.number, request, method.reply, deadline_s=10)


def _operator(secure: Secure) -> list[str]:
    tls = ("--tls-ca", secure.tls.ca, "--tls-cert", secure.tls.cert, "--tls-key", secure.tls.key)
    return ["--master", secure.cluster.master, "--token", f"@{secure.folder / 'operator.token'}", *tls]
