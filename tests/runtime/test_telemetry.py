"""The log of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import structlog
from tanghulu.runtime.telemetry import configure_log
configure_log("node")
for number in range(100):
    structlog.get_logger().info("something.happened", number=number)
print("went on")
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_process_whose_log_is_on_a_full_disk_goes_on():
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=full, timeout=60)
    assert done.stdout == b"went on\n"
    assert done.returncode == 0
