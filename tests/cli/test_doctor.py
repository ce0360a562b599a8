"""``tanghulu doctor``: what it says of machines that lack something, and of this one."""

import json
import socket

import pytest
from click.testing import CliRunner

from tanghulu.cli import doctor
from tanghulu.cli.doctor import NEEDS, Level, examine
from tanghulu.cli.main import root
from tanghulu.errors import ConfigError
from tanghulu.runtime import extras

GIB = 1 << 20  # in KiB, as /proc/meminfo counts


@pytest.fixture
def machine(tmp_path):
    def make(flags="sse2", free_gib=2, thp="always [never]"):
        files = {
            "proc/cpuinfo": f"processor : 0\nflags : {flags}\n",
            "proc/meminfo": f"MemTotal: {8 * GIB} kB\nMemAvailable: {free_gib * GIB} kB\n",
            "sys/kernel/mm/transparent_hugepage/shmem_enabled": thp,
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def _one(check, machine):
    (finding,) = check(machine)
    return finding


def test_a_small_old_machine(machine):
    small = machine()
    assert _one(doctor.memory, small).level is Level.NOTE
    assert _one(doctor.cpu, small).found.endswith("none of the wide instructions")
    assert _one(doctor.huge_pages, small).remedy
    assert _one(doctor.gpus, small).found.startswith("none")


def test_a_large_new_machine(machine):
    large = machine("sse2 avx2 avx512f avx512_bf16", 6, "always within_size [advise] never")
    (large / "dev").mkdir()
    (large / "dev/nvidia0").touch()
    assert {_one(check, large).level for check in (doctor.memory, doctor.cpu, doctor.huge_pages, doctor.gpus)} == {
        Level.FINE
    }


def test_a_port_that_is_taken_is_named(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "UP_PORTS", {port: "master"})
        (finding,) = doctor.ports(None)
    assert finding.level is Level.MISSING
    assert "--master-port" in finding.remedy


def test_a_missing_extra_says_what_to_type(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "worker", ("no_such_module",))
    (finding,) = doctor.worker_packages(None)
    assert finding.level is Level.MISSING
    assert "pip install" in finding.remedy
    assert "[worker]" in finding.remedy
    with pytest.raises(ConfigError, match=r"--engine torch needs the package no_such_module: pip install"):
        extras.require("worker", "--engine torch")


@pytest.mark.parametrize("command", NEEDS)
def test_this_machine(command):
    findings = examine(command)
    assert {each.subject for each in findings} >= {"python", "open files"}
    done = CliRunner().invoke(root, ["doctor", command])
    assert all(each.subject in done.output for each in findings if " " not in each.subject)


def test_json_for_programs():
    done = CliRunner().invoke(root, ["doctor", "master", "--json"])
    assert {each["level"] for each in json.loads(done.output)} <= {"ok", "note", "missing"}
