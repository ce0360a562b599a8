"""The wheel in an environment outside of the checkout: complete, and it runs a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.cluster import running_cluster
from tools import release


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment in which the wheel is installed; other packages are those of the tests' own."""
    folder = tmp_path_factory.mktemp("release")
    wheel = release.build(folder / "dist")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder / "venv"), "platbase": str(folder / "venv")})
    # A line in a .pth file puts a folder on the path without reading .pth files in it: not the editable install's.
    (Path(paths["purelib"]) / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv"), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--ignore-installed", str(wheel)], check=True)
    return folder / "venv" / "bin"


def _run(program: Path, *arguments: str, cwd: Path) -> str:
    return subprocess.run(
        [program, *arguments], cwd=cwd, env=_clean(), check=True, capture_output=True, text=True
    ).stdout


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.mark.slow
def test_the_installed_package_is_the_wheels(installed: Path, tmp_path: Path) -> None:
    where = _run(installed / "python", "-c", "import tanghulu; print(tanghulu.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert _run(installed / "tanghulu", "--version", cwd=tmp_path).split()[-1] == "0.1.0"


@pytest.mark.slow
def test_up_answers_and_ends(installed: Path, tmp_path: Path) -> None:
    flags = ("--engine", "mock", "--model", "mock", "--prefill", "1", "--decode", "1")
    outside = ("env", "-C", str(tmp_path), "-u", "PYTHONPATH", str(installed / "tanghulu"))
    with running_cluster(tmp_path / "state", *flags, program=outside) as cluster:
        assert cluster.generate("one two three", 4)["meta_info"]["completion_tokens"] == 4
        assert "<title>" in cluster.http.get(f"{cluster.url}/dashboard").text
        assert cluster.stop() == 0
