"""The script behind the guests, with tools that only pretend: what it says is missing; a cache whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "rdma_vm" / "rdma_vm.sh"
#: Each writes its name to $CALLS; whoever stands in $HANG says so in $HUNG and waits to be killed.
_TOOL = """#!/bin/bash
name=$(basename "$0")
echo "$name" >> "$CALLS"
[[ " $HANG " != *" $name "* ]] || {{ echo hangs > "$HUNG"; sleep 600; }}
{}
"""
TOOLS = {
    "dpkg-query": '[[ " $ABSENT " == *" ${*: -1} "* ]] || echo install ok installed',
    "apt-cache": 'echo "  Depends: linux-image-6.1.0-fake"',
    "apt-get": "echo deb > linux-image.deb",
    "dpkg-deb": 'mkdir -p "$3/boot" "$3/lib/modules/6.1.0-fake"; echo kernel > "$3/boot/vmlinuz-6.1.0-fake"; '
    'echo module > "$3/lib/modules/6.1.0-fake/m.ko"',
    "depmod": 'touch "$2/lib/modules/$3/modules.dep"',
    "modprobe": 'ls "$2/lib/modules/$4/modules.dep" >/dev/null && echo "insmod $2/lib/modules/$4/m.ko"',
    "cpio": "cat",
    **dict.fromkeys(("busybox", "qemu-system-x86_64", "ip", "rdma"), "true"),
}


class Host:
    """A folder of tools in front of the machine's own, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.cache, self.calls, self.hung = (folder / name for name in ("bin", "cache", "calls", "hung"))
        self.bin.mkdir()
        for name, body in TOOLS.items():
            (self.bin / name).write_text(_TOOL.format(body))
            (self.bin / name).chmod(0o755)
        os.mkfifo(self.hung)

    def environment(self, **more: str) -> dict[str, str]:
        own = {"RDMA_VM_CACHE": self.cache, "CALLS": self.calls, "HUNG": self.hung, "HANG": "", "ABSENT": ""}
        return os.environ | {"PATH": f"{self.bin}:{os.environ['PATH']}"} | {k: str(v) for k, v in own.items()} | more

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [SCRIPT, *arguments], capture_output=True, text=True, timeout=60, env=self.environment(**more)
        )

    def kill_in(self, tool: str, number: int) -> None:
        """Prepare, and kill everything while ``tool`` runs."""
        command = [SCRIPT, "prepare"]
        prepare = subprocess.Popen(command, env=self.environment(HANG=tool), start_new_session=True)
        assert self.hung.read_text() == "hangs\n"
        os.killpg(prepare.pid, number)
        prepare.wait(60)

    def is_whole(self) -> bool:
        (built,) = self.cache.glob("built-*")
        assert sorted(each.name for each in self.cache.iterdir()) == [built.name, "lock"], "nothing else is left"
        return sorted(each.name for each in built.iterdir()) == ["initrd", "sums", "vmlinuz"]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_it_says_in_one_line_what_to_install(host: Host) -> None:
    for command, status in ((("prepare",), 1), (("run", "--", "true"), 125)):
        done = host.run(*command, ABSENT="kmod libibverbs1")
        assert done.returncode == status
        assert done.stderr.splitlines() == [
            "rdma_vm.sh: missing depmod, modprobe, libibverbs1: apt-get update && "
            "apt-get install -y --no-install-recommends kmod libibverbs1"
        ]
    assert not host.cache.exists()
    assert "apt-get" not in host.calls.read_text()
    assert host.run("missing", ABSENT="kmod").stdout.split("\n", 1) == ["kmod", f"a kernel: {SCRIPT} prepare\n"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("tool", ["apt-get", "dpkg-deb", "depmod", "modprobe", "cpio"])
def test_an_interrupted_prepare_is_as_if_it_had_not_been(host: Host, tool: str, number: int) -> None:
    host.kill_in(tool, number)
    assert host.run("missing").stdout.startswith("a kernel: ")
    assert host.run("run", "--", "true").returncode == 125
    assert host.run("prepare").returncode == 0
    assert host.is_whole()
    assert host.run("missing").stdout == ""


def test_what_is_whole_is_kept(host: Host) -> None:
    assert host.run("prepare").returncode == 0
    host.calls.write_text("")
    assert host.run("prepare").returncode == 0
    assert "apt-get" not in host.calls.read_text()


@pytest.mark.parametrize("file", ["vmlinuz", "initrd", "sums"])
def test_a_damaged_cache_is_built_again(host: Host, file: str) -> None:
    assert host.run("prepare").returncode == 0
    (damaged,) = host.cache.glob(f"built-*/{file}")
    damaged.write_text("half")
    assert host.run("missing").stdout.startswith("a kernel: ")
    assert host.run("prepare").returncode == 0
    assert host.is_whole()


def test_what_an_older_version_left_is_removed(host: Host) -> None:
    """It was interrupted before depmod, and then never worked again."""
    for folder in ("root/boot", "root/lib/modules/6.1.0-fake", "deb"):
        (host.cache / folder).mkdir(parents=True)
    (host.cache / "root/boot/vmlinuz-6.1.0-fake").write_text("kernel")
    (host.cache / "initrd-123").touch()
    assert host.run("missing").stdout.startswith("a kernel: ")
    assert host.run("prepare").returncode == 0
    assert host.is_whole()
