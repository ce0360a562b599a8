"""Build the release: the source archive, and the wheel built from it; say what they weigh and check that all is in.

    tools/release.py [FOLDER] [--keep]

The wheel is built from the unpacked archive, as a distributor would, so what the archive lacks is missing in it. What
the tree has and the wheel has not is an error. ``--keep`` writes size and import time beside the other figures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "tanghulu"
#: What a package of ours consists of, by the ends of its files' names.
SHIPPED = {".py", ".pyi", ".proto", ".typed", ".html", ".txt"}
_LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "site", "htmlcov")


class Incomplete(Exception):
    """The wheel lacks files of the tree."""


def build(folder: Path) -> Path:
    """Build archive and wheel into ``folder``; the wheel's path. Raises Incomplete, or CalledProcessError."""
    with tempfile.TemporaryDirectory() as scratch:
        # setuptools writes into the tree that it packs, so it gets one of its own.
        tree = Path(scratch) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder.resolve()), str(tree)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    if missing := in_tree() - in_wheel(wheel):
        raise Incomplete(f"not in {wheel.name}: {', '.join(sorted(missing))}; see package-data in pyproject.toml")
    return wheel


def in_tree() -> set[str]:
    """The files of the package, as paths below ``src``; its rooms are links to the top-level folders."""
    found = set[str]()
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        at = Path(folder).relative_to(PACKAGE.parent)
        found |= {str(at / name) for name in names if Path(name).suffix in SHIPPED}
    return found


def in_wheel(wheel: Path) -> set[str]:
    """The files that ``wheel`` installs, its description of itself apart."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("tanghulu/")}


def import_ms(python: str, module: str) -> float:
    """Least time of five in which a new interpreter imports ``module``, less what it takes to start, in ms."""
    script = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    folder = tempfile.gettempdir()
    runs = [subprocess.run([python, "-c", script], check=True, capture_output=True, cwd=folder) for _ in range(5)]
    return round(min(float(run.stdout) for run in runs) * 1000, 1)


def main() -> int:
    """Build, check and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results/release.json")
    options = parser.parse_args()
    wheel = build(options.folder)
    rows = [{"what": path.name, "num_bytes": path.stat().st_size} for path in sorted(options.folder.iterdir())]
    modules = ["tanghulu", "tanghulu.cli.main", "tanghulu.store.client.client", "tanghulu.conductor.main"]
    rows += [{"what": f"import {name}", "ms": import_ms(sys.executable, name)} for name in modules]
    for row in rows:
        print("  ".join(str(value) for value in row.values()))
    print(f"{len(in_wheel(wheel))} files in {wheel}")
    if options.keep:
        sys.path.insert(0, str(ROOT))
        from benchmarks.common.report import keep

        keep("release", rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
