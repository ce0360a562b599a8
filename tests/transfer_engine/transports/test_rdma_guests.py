"""Real verbs: boots two guests with soft-RoCE devices and runs the transport's tests in them (tests/rdma_vm)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "rdma_vm"
SCRIPT = FOLDER / "rdma_vm.sh"
TESTS = (FOLDER / "guest_contract.py", FOLDER / "guest_failures.py")
#: 168 s on two cores with a load of 8 beside it; a busier machine may take longer.
LIMIT_S = 360


@pytest.mark.rdma
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 30)
def test_the_guests_pass(tmp_path: Path):
    missing = subprocess.run([SCRIPT, "missing"], capture_output=True, text=True, check=True).stdout.split("\n")
    if any(missing):
        pytest.skip(f"no guests can be booted; apt-get install and prepare: {' '.join(filter(None, missing))}")
    guests = subprocess.run(
        [SCRIPT, "run", "--vms", "2", "--timeout", str(LIMIT_S), "--out", tmp_path, "--",
         FOLDER / "guest.sh", sys.executable, *TESTS],
        capture_output=True, text=True, cwd=FOLDER.parents[1],
    )  # fmt: skip
    print(guests.stdout)
    assert guests.returncode == 0, f"{guests.stdout[-20000:]}\n{guests.stderr[-1000:]}"
    assert re.search(r"\d\d passed in", guests.stdout)
