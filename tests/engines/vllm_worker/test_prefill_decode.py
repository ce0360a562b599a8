"""A vLLM worker that prefills and one that decodes: the prompt's KV goes through the store. By hand: two more vLLMs."""

from __future__ import annotations

import ast
import contextlib
import json
import signal

import pytest

from tests.engines.vllm.conftest import MODEL, PYTHON
from tests.engines.vllm_worker.conftest import BLOCK_TOKENS, START_DEADLINE_S, Served, VllmWorker
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.slow, pytest.mark.by_hand, pytest.mark.timeout(3000)]
PROMPT = [100 + i % 400 for i in range(650)]
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["plum", "hawthorn"]}}, "required": ["name"]}


def num_loaded(worker: VllmWorker) -> int:
    """End the worker; the blocks that its vLLM has loaded, as it says at its end."""
    worker.popen.send_signal(signal.SIGTERM)
    worker.popen.wait(START_DEADLINE_S)
    (told,) = [line for line in worker.log_text().splitlines() if "moved by rank" in line]
    counts = ast.literal_eval(told[told.index("{") : told.index("}") + 1])
    return int(counts["keys_loaded"])


def test_a_prompt_is_computed_by_one_and_answered_by_the_other() -> None:
    if not (PYTHON.exists() and MODEL.exists()):
        pytest.skip("extra: vLLM's environment is missing; tools/engine_venv.py vllm builds it")
    with Cluster(1, "2GiB", checked=False) as store, contextlib.closing(Served(store)) as served:
        whole = served.add()
        alone = served.complete(PROMPT, 24)["choices"][0]["text"]
        whole.end()
        served.workers.clear()
        served.add("--role", "prefill")
        decode = served.add("--role", "decode")
        for salt in ("one", "two"):  # nobody has the blocks under these names yet
            answer = served.complete(PROMPT, 24, cache_salt=salt)
            assert answer["choices"][0]["text"] == alone
            assert answer["usage"]["completion_tokens"] == 24
        assert served.metric("tanghulu_conductor_hand_overs_total") == 2
        one = served.complete(PROMPT, 1, cache_salt="one")
        assert alone.startswith(one["choices"][0]["text"])
        chosen = served.chat("Which fruit?", max_tokens=40, response_format={
            "type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA}
        })  # fmt: skip
        assert json.loads(chosen["choices"][0]["message"]["content"])["name"] in ("plum", "hawthorn")
        assert served.metric("tanghulu_conductor_hand_overs_total") == 3
        assert num_loaded(decode) >= 2 * (len(PROMPT) // BLOCK_TOKENS)
