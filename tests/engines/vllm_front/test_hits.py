"""Conversations replayed over two plain vLLM servers find nearly the prefixes that one cache for all would have had.

The conversations are those of the trace's excerpt that go on within it. A block of the trace has 512 tokens, here one
block of vLLM's; prompts are made of its block names, so that a block seen before, behind blocks seen before, is what
one shared cache of any size would have had. The servers count what they find.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.engines.vllm_front.conftest import ANSWER_S, BLOCK_TOKENS, MARKS, Server, running_front

pytestmark = MARKS
TRACE = Path(__file__).parents[2] / "conductor" / "replay" / "data" / "conversation_excerpt.jsonl.gz"
TRACE_BLOCK = 512
SCALE = TRACE_BLOCK // BLOCK_TOKENS
#: Longest turn, and tokens of an answer, as in the trace; the number of requests, their pace, and how many at a time.
MAX_INPUT, OUTPUT, NUM_REQUESTS, SPEEDUP, CONNECTIONS = 8_000, 8 * SCALE, 120, 4, 4
LEAST_SHARE = 0.93


def conversations() -> list[dict[str, Any]]:
    """The first requests of conversations of several turns, in the order of the trace."""
    requests = [json.loads(line) for line in gzip.decompress(TRACE.read_bytes()).splitlines()]
    turns = defaultdict(list)  # by the second block: the first one is everybody's
    for request in requests:
        if len(request["hash_ids"]) > 2:
            turns[request["hash_ids"][1]].append(request)
    going_on = [each for each in turns.values() if len(each) > 1 and each[-1]["input_length"] <= MAX_INPUT]
    chosen = sorted((request for each in going_on for request in each), key=lambda each: each["timestamp"])
    return [each | {"output_length": OUTPUT} for each in chosen[:NUM_REQUESTS]]


def most_hits(requests: list[dict[str, Any]]) -> int:
    """Tokens in full blocks whose prompt came before, up to there; the last token is always computed."""
    seen, hits = set[int](), 0
    for request in requests:
        names = request["hash_ids"][: (request["input_length"] - 1) // TRACE_BLOCK]
        hits += next((at for at, name in enumerate(names) if name not in seen), len(names))
        seen.update(names)
    return hits * BLOCK_TOKENS


def test_conversations_find_what_one_cache_would_have(servers: list[Server], tmp_path: Path) -> None:
    requests = conversations()
    trace = tmp_path / "conversations.jsonl"
    trace.write_text("".join(json.dumps(each) + "\n" for each in requests))
    before = [each.metric("vllm:prefix_cache_hits_total") for each in servers]
    with running_front(tmp_path, servers, ANSWER_S) as front:
        command = [sys.executable, "-m", "tanghulu", "replay", str(trace), "--live", str(front.http.base_url)]
        command += ["--scale", str(SCALE), "--speedup", str(SPEEDUP), "--connections", str(CONNECTIONS)]
        command += ["--warmup", "0", "--json"]
        told = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    assert (told["num_requests"], told["failed_requests"], told["rejected_requests"]) == (len(requests), 0, 0)
    hits = [each.metric("vllm:prefix_cache_hits_total") - was for each, was in zip(servers, before, strict=True)]
    print({"hits": hits, "most": most_hits(requests), "share": sum(hits) / most_hits(requests)})
    assert min(hits) > 0
    assert LEAST_SHARE * most_hits(requests) <= sum(hits) <= most_hits(requests)
