"""A vLLM worker without requests for five minutes keeps its session. By hand: the minutes are the test."""

from __future__ import annotations

import contextlib
import time

import pytest

from tests.engines.vllm.conftest import MODEL, PYTHON
from tests.engines.vllm_worker.conftest import Served, cached_tokens
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.slow, pytest.mark.by_hand, pytest.mark.timeout(3000)]
#: Pings come every 10 seconds; a server that minds them ends the session within a minute.
IDLE_S = 300.0
PROMPT = list(range(1000, 1100))


def test_a_session_without_requests_stays() -> None:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    with Cluster(1, "256MiB", checked=False) as store, contextlib.closing(Served(store)) as served:
        served.add()
        assert served.complete(PROMPT, 1)["usage"]["completion_tokens"] == 1
        time.sleep(IDLE_S)  # nothing is waited for: it shall not happen
        assert "session_ended" not in served.conductor.log_text()
        assert served.metric("tanghulu_conductor_workers") == 1
        assert cached_tokens(served.complete(PROMPT, 1)) == 64
