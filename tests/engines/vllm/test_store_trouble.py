"""One vLLM while its store stands still, dies, comes back or is too small: answers stay, and no block stays pinned."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.vllm.conftest import MODEL, Conversation, Vllm
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(3000)]
ENGINE = Path(__file__).parent / "engine_process.py"
#: Tokens of SmolLM2 that stand for text, not for structure.
ORDINARY = (1000, 40_000)
LOAD_DEADLINE_S = 5.0
#: A cache of three prompts, so that requests are preempted.
SMALL = {"num_gpu_blocks_override": 52, "max_num_seqs": 3, "max_model_len": 2048}
#: What the connector warns of.
ALONE, AWAY = "skipping it for a moment", "the store does not answer"


def prompts_of(num_prompts: int, num_tokens: int) -> list[list[int]]:
    random = np.random.default_rng(num_tokens)
    return [random.integers(*ORDINARY, num_tokens).tolist() for _ in range(num_prompts)]


def spec_of(store: Cluster, prompts: Sequence[list[int]], **arguments: Any) -> dict[str, Any]:
    connector = {"master": store.address, "load_deadline_s": LOAD_DEADLINE_S, "lookup_deadline_ms": 1000}
    return {
        "model": str(MODEL),
        "dtype": "float32",
        "connector": connector,
        "prompts": prompts,
        "arguments": arguments,
    }


def first_answers(engine: Conversation, prompts: Sequence[list[int]]) -> list[list[int]]:
    """The texts of the prompts of the program's first line, computed."""
    texts = [engine.hear()["answered"] for _ in prompts]
    assert engine.hear() == {"unpinned": True}
    return texts


def test_a_node_that_stands_still_and_a_store_that_dies(vllm: Vllm, store: Cluster) -> None:
    prompts = prompts_of(4, 700)
    with vllm.running(ENGINE, spec_of(store, prompts)) as engine:
        texts = first_answers(engine, prompts)

        def asked(*numbers: int, meanwhile: Callable[[], object] = lambda: None) -> None:
            engine.say({"prompts": [prompts[number] for number in numbers]})
            meanwhile()
            told = engine.hear()
            print([(number, each["ttft_s"]) for number, each in zip(numbers, told["answers"], strict=True)])
            assert [each["answered"] for each in told["answers"]] == [texts[number] for number in numbers]
            assert told["unpinned"]
            cached.append([each["cached"] for each in told["answers"]])

        cached = list[list[int]]()
        asked(0)
        store.nodes[0].popen.send_signal(signal.SIGSTOP)
        asked(1)
        assert ALONE in vllm.log_text(), "the load from the node that stands still"
        asked(2)
        store.nodes[0].popen.send_signal(signal.SIGCONT)
        for _ in range(3):
            time.sleep(1.5)  # the breaker rests
            asked(3)

        asked(0, 1, 2, meanwhile=store.nodes[0].kill)
        asked(0, 1, 2, meanwhile=store.master.kill)
        asked(0, 1, 2)
        asked(0, 1, 2, meanwhile=lambda: (store.restart_master(), store.add_node("2GiB")))
        for _ in range(10):
            asked(*range(4))
            if cached[-1] == [640] * 4:
                break
            time.sleep(1.0)
    print(cached)
    assert AWAY in vllm.log_text(), "the lookup while the master was gone"
    assert cached[-1] == [640] * 4, "found again"


def test_a_small_cache_with_requests_that_are_given_up(vllm: Vllm, store: Cluster) -> None:
    prompts, others = prompts_of(6, 1000), prompts_of(4, 900)
    with vllm.running(ENGINE, spec_of(store, prompts, **SMALL)) as engine:
        texts = first_answers(engine, prompts)
        for _ in range(2):
            gone = [[prompt, 0.2 + number] for number, prompt in enumerate(others)]
            told = engine.ask(prompts=prompts, abort=gone)
            assert [each["answered"] for each in told["answers"]] == texts
            assert told["unpinned"], "a block stays in use"
            assert sum(each["cached"] for each in told["answers"]) > 0, "from the store, for the cache was empty"


def test_a_store_without_room_is_no_error(vllm: Vllm) -> None:
    (prompt,) = prompts_of(1, 300)
    with Cluster(1, "2MiB", checked=False) as small, vllm.running(ENGINE, spec_of(small, [prompt])) as engine:
        (text,) = first_answers(engine, [prompt])
        told = engine.ask(prompts=[prompt])
        (again,) = told["answers"]
        assert (again["answered"], again["cached"], told["unpinned"]) == (text, 0, True)
