"""The log of a process."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from google.protobuf.message import DecodeError
from structlog.testing import capture_logs

from tanghulu.runtime import telemetry

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


def test_a_rare_log_says_each_event_once_in_a_while_and_how_often_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: now_s)
    with capture_logs() as logs:
        rare = telemetry.RareLog(structlog.get_logger(), every_s=10.0, worker="w")
        for now_s in (0.0, 1.0, 9.9, 10.0, 11.0):
            rare.warning("odd", at_s=now_s)
            rare.warning("other") if not now_s else None
    said = [(line["event"], line.get("at_s"), line.get("omitted")) for line in logs]
    assert said == [("odd", 0.0, None), ("other", None, None), ("odd", 10.0, 2)]
    assert logs[0]["worker"] == "w"


def test_lines_of_libraries_are_lines_of_the_log() -> None:
    record = logging.LogRecord("uvicorn.error", logging.WARNING, "f.py", 1, "Invalid %s", ("request",), None)
    with capture_logs() as logs:
        telemetry._LibraryLog().emit(record)
    (line,) = logs
    said = (line["event"], line["logger"], line["text"], line["log_level"])
    assert said == ("library.logged", "uvicorn.error", "Invalid request", "warning")


def test_bytes_that_are_no_message_are_a_rare_line_without_a_trace() -> None:
    fault = (DecodeError, DecodeError("Wire format was corrupt"), None)
    record = logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "f.py", 1, "Unexpected %s", ("fault",), fault)
    handler = telemetry._LibraryLog()
    with capture_logs() as logs:
        for _ in range(100):
            handler.emit(record)
    (line,) = logs
    assert (line["log_level"], line["text"], line.get("exc_info")) == ("warning", "Unexpected fault", None)
