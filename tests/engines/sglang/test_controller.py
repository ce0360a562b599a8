"""The connector under SGLang 0.5.23's own controller and host memory, on a real store, which also goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.store.cluster import Cluster, eventually

pytestmark = [pytest.mark.engine_sglang, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
PYTHON = Path.home() / ".cache" / "tanghulu" / "engines" / "sglang" / "bin" / "python"
END_S = 60


class SGLang:
    """A process of SGLang's environment that performs scenarios."""

    def __init__(self, master: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"}
        self.process = subprocess.Popen(
            [PYTHON, Path(__file__).with_name("scenarios.py"), master],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __call__(self, scenario: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([scenario, arguments]) + "\n")
        self.process.stdin.flush()
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("answer "):
            assert line, "SGLang's process ended"
        answer = json.loads(line.removeprefix("answer "))
        assert "said" in answer, answer["error"]
        return answer["said"]

    def close(self) -> None:
        self.process.stdin.close()
        try:
            assert self.process.wait(END_S) == 0
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture(scope="module")
def store() -> Iterator[Cluster]:
    if not PYTHON.exists():
        pytest.skip("extra: SGLang's environment is missing; tools/engine_venv.py sglang builds it")
    with Cluster(1, "512MiB", checked=False) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def sglang(store: Cluster) -> Iterator[SGLang]:
    process = SGLang(store.address)
    yield process
    process.close()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_go_out_of_one_pool_into_another(sglang: SGLang, layout: str) -> None:
    whole = {"saved": 64, "found": 8, "loaded": 8, "equal": [True] * 8}
    assert sglang("round_trip", layout=layout) == whole
    assert sglang("round_trip", layout=layout, interface_v1=0) == whole


def test_the_threads_of_the_controller(sglang: SGLang) -> None:
    assert sglang("threads") == [64, 64, 64]


def test_a_page_that_goes_between_query_and_load_ends_the_prefix(sglang: SGLang) -> None:
    assert sglang("removed_page") == [8, 5, 5]


def test_under_sglangs_failure_injector_pages_are_whole_or_missing(sglang: SGLang) -> None:
    said = sglang("failure_injector")
    assert said == {"backend": "HiCacheStorageFailureInjector", "lengths": [0, 8], "wrong": 0}


def test_pools_of_hybrid_models(sglang: SGLang) -> None:
    said = sglang("hybrid_pools")
    assert said["saved"] == {"kv": [True] * 8, "swa": [True] * 2}
    assert said["trailing"] == [4, [4], {"kv": 8, "swa": 4}]
    assert said["groups"] == [8, list(range(1, 9)), {"kv": 8, "swa": 4}]
    assert (said["loaded"], said["equal"]) == ({"swa": [True] * 2}, [True] * 2)


def test_ranks_of_a_model_with_heads_have_pages_each(sglang: SGLang) -> None:
    said = sglang("tensor_ranks", mla=False)
    assert said == {"skips": [False, False], "saved": 64, "found": [8, 0], "loaded": 0, "same": [False] * 8}


def test_ranks_of_an_mla_model_share_what_the_first_writes(sglang: SGLang) -> None:
    said = sglang("tensor_ranks", mla=True)
    assert said == {"skips": [False, True], "saved": 64, "found": [8, 8], "loaded": 8, "same": [True] * 8}


def test_clear_leaves_others_alone(sglang: SGLang) -> None:
    assert sglang("clear") == [0, 8]


def test_sglangs_metrics_show_what_was_moved(sglang: SGLang) -> None:
    said = sglang("metrics")
    assert said["theirs"] == 8
    assert said["ours"] >= 8


def test_a_bad_option_ends_the_start_with_its_name(sglang: SGLang) -> None:
    assert sglang("bad_option").startswith("ConfigError: unknown option 'mastre'")


def test_the_recorded_interface_is_the_installed_one(sglang: SGLang) -> None:
    assert sglang("recording") == []


def test_loads_take_milliseconds(sglang: SGLang, record_property: Any) -> None:
    record_property("seconds_of_8_pages", sglang("seconds_of_a_load"))


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_goes_away_is_misses(store: Cluster, sglang: SGLang, how: signal.Signals) -> None:
    with Cluster(1, "256MiB", checked=False) as own, closing(SGLang(own.address)) as process:
        assert process("begin") == 64
        for part in (own.nodes[0], own.master):
            part.kill() if how is signal.SIGKILL else part.popen.send_signal(how)
        first = process("attempt")
        assert (first["found"], first["loaded"], first["saved"], first["is_healthy"]) == (0, 0, 0, False)
        if how is signal.SIGSTOP:
            for part in (own.nodes[0], own.master):
                part.popen.send_signal(signal.SIGCONT)
            eventually(lambda: process("attempt") | {"counts": 0} == _whole())
        process("end")


def _whole() -> dict[str, Any]:
    return {"found": 8, "loaded": 8, "saved": 64, "is_healthy": True, "counts": 0}
