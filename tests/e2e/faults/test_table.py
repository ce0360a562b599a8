"""The table of docs/faults.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.faults.parts import FAULTS

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text()
#: The page's short names, as its introduction has them.
SHORT = {
    "mock": "e2e/test_mock_cluster.py",
    "matrix": "e2e/faults/test_matrix.py",
    "chaos": "e2e/faults/test_chaos.py",
    "rolling": "e2e/faults/test_rolling_restart.py",
    "routers": "e2e/faults/test_routers.py",
    "start": "e2e/faults/test_start_without_master.py",
    "hosts": "hosts/test_spread_cluster.py",
    "holes": "hosts/test_black_holes.py",
    "moves": "conductor/dispatch/test_moves.py",
    "deadlines": "conductor/dispatch/test_deadlines.py",
    "queue": "conductor/dispatch/test_queue.py",
}
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "| test |" not in line]
_NAMED = re.compile(r"`([^`]+)`(?:: `([^`]+)`)?")


def test_the_table_was_found() -> None:
    assert len(ROWS) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_the_tests_of_a_row_exist(row: str) -> None:
    named = _NAMED.findall(row.rstrip(" |").rpartition("|")[2])
    assert named, "each fault has a test"
    for file, test in named:
        source = (ROOT / "tests" / SHORT.get(file, file)).read_text()
        words = test.split("-") if file == "matrix" else [test]
        for word in words:
            assert word in source or word in FAULTS, f"{file} has no {word!r}"
