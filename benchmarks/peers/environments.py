"""Peers' virtual environments, made on demand in ``.bench/`` by package name; says what the system lacks.

Each peer has one of its own, because their pins fight ours. A peer that cannot be had here is left out of a run, and
the run says so and why: nothing is skipped silently.
"""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCH = ROOT / ".bench"
INSTALL_TIMEOUT_S = 900


@dataclass(frozen=True)
class Peer:
    """What a peer needs: packages for pip; libraries and programs of the system, with Debian's packages."""

    name: str
    module: str
    packages: tuple[str, ...]
    libraries: tuple[tuple[str, str], ...] = ()
    programs: tuple[tuple[str, str], ...] = ()


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "mooncake",
            "mooncake",
            ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
            (("ibverbs", "libibverbs1"), ("numa", "libnuma1"), ("curl", "libcurl4")),
        ),
        Peer("nixl", "nixl_cu12", ("--no-deps", "nixl", "nixl-cu12", "numpy")),
        Peer("redis", "redis", ("redis",), (), (("redis-server", "redis-server"),)),
    )
}


class Missing(Exception):
    """The peer cannot run here; the message says what to install."""


def interpreter(name: str) -> Path:
    """The Python of the peer's environment, made if need be. Raises Missing."""
    peer = PEERS[name]
    lacking = [package for library, package in peer.libraries if ctypes.util.find_library(library) is None]
    lacking += [package for program, package in peer.programs if shutil.which(program) is None]
    if lacking:
        raise Missing(f"apt-get install {' '.join(lacking)}")
    python = BENCH / name / "bin" / "python"
    if not (BENCH / name / ".ready").exists():
        _install(peer, python)
    return python


def packages_folder(name: str) -> Path:
    """Where the peer's packages are."""
    python = BENCH / name / "bin" / "python"
    code = "import sysconfig; print(sysconfig.get_paths()['platlib'])"
    return Path(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip())


def logs() -> Path:
    """The folder of the workers' logs."""
    folder = BENCH / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _install(peer: Peer, python: Path) -> None:
    print(f"installing {peer.name} into {python.parents[1]}: pip install {' '.join(peer.packages)}", file=sys.stderr)
    try:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True, timeout=INSTALL_TIMEOUT_S)
        subprocess.run([python, "-m", "pip", "install", "-q", *peer.packages], check=True, timeout=INSTALL_TIMEOUT_S)
        subprocess.run([python, "-c", f"import {peer.module}"], check=True, timeout=INSTALL_TIMEOUT_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
        raise Missing(f"{peer.name} does not install or import: {error}") from error
    (BENCH / peer.name / ".ready").touch()
