"""Look at the versions that CI and `make up` use: each is pinned once, exactly, and as pyproject.toml allows.

Usage: python tools/audit.py [--online]. With --online pip-audit, in an environment of its own, asks PyPI for known
weaknesses of each pin. A service that cannot be reached, or that answers for no package, is said in one line and is no
failure, and no success either.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PINS = ROOT / "constraints.txt"
#: Requirements that CI installs from elsewhere, or that only some machines can have.
NOT_PINNED = frozenset({"nixl-cu12"})


def wrong_pins(constraints: str, requirements: list[str]) -> list[str]:
    """What is wrong with the lines of constraints.txt, seen beside the project's requirements."""
    found, pins = [], dict[str, Version]()
    for line in constraints.splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        pinned = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s*]+)", text)
        if pinned is None:
            found.append(f"{text}: no exact version")
            continue
        name = canonicalize_name(pinned[1])
        if name in pins:
            found.append(f"{text}: {name} is pinned twice")
        pins[name] = Version(pinned[2])
    for each in map(Requirement, requirements):
        name = canonicalize_name(each.name)
        if name in NOT_PINNED:
            continue
        if name not in pins:
            found.append(f"{each}: it is not pinned")
        elif not each.specifier.contains(pins[name], prereleases=True):
            found.append(f"{each}: {pins[name]} is pinned")
    return found


def requirements_of(pyproject: str) -> list[str]:
    """The project's dependencies, those of all its extras included."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"].values()
    return [*project["dependencies"], *(each for extra in extras for each in extra)]


def told(report: str) -> tuple[list[str], int]:
    """(weaknesses, packages that the service answered for) in pip-audit's JSON."""
    answered = [each for each in json.loads(report)["dependencies"] if "skip_reason" not in each]
    known = [f"{each['name']} {each['version']}: {weak['id']}" for each in answered for weak in each["vulns"]]
    return known, len(answered)


def ask() -> int:
    """The exit code of asking PyPI for weaknesses."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        installed = subprocess.run([python, "-m", "pip", "install", "-q", "pip-audit"], capture_output=True, text=True)
        if installed.returncode != 0:
            print("audit: pip-audit cannot be installed here; nothing was asked")
            return 0
        flags = ("--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json")
        command = [python, "-m", "pip_audit", *flags, "-r", PINS]
        done = subprocess.run(command, capture_output=True, text=True)
    try:
        known, num_answered = told(done.stdout)
    except ValueError:
        print("audit: the service cannot be reached from here; nothing was asked")
        return 0
    if not num_answered:
        print("audit: the index here tells of no package's weaknesses; nothing is known")
        return 0
    print(f"audit: {num_answered} packages asked for, {len(known)} known weaknesses")
    print("\n".join(known), end="\n" if known else "")
    return 1 if known else 0


def main() -> None:
    """Check, and with --online ask."""
    wrong = wrong_pins(PINS.read_text(), requirements_of((ROOT / "pyproject.toml").read_text()))
    if wrong:
        sys.exit("constraints.txt:\n" + "\n".join(wrong))
    if "--online" in sys.argv[1:]:
        sys.exit(ask())


if __name__ == "__main__":
    main()
