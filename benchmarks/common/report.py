"""What every benchmark says beside its figures: machine, command, seed, versions, date; and where it is kept."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """The machine that the figures were measured on."""
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown",
    )
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(memory_kib / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _program() -> list[str]:
    """How this program was called: ``-m`` and the module, for one of the benchmarks."""
    script = Path(sys.argv[0]).resolve()
    if not script.is_relative_to(ROOT):
        return [sys.argv[0]]
    return ["-m", ".".join(script.relative_to(ROOT).with_suffix("").parts)]


def keep(name: str, rows: list[dict[str, Any]], *, seed: int | None = None, **more: Any) -> Path:
    """Write ``rows`` to results/<name>.json with all that is needed to measure them again; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {
        "benchmark": name,
        "command": " ".join(["python", *_program(), *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seed": seed,
        "machine": machine(),
        **more,
        "rows": rows,
    }
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
