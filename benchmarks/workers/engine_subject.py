"""One engine under the stop-watch: loads a model, runs the named measurements, prints a JSON line for each.

Started by engine.py under the interpreter of the engine's own environment, so it imports nothing of tanghulu unless
that is the engine. Every engine is asked in its own words for the same: greedy tokens for prompts of random ids,
nothing cached between prompts, two threads.

decode: (time of N tokens - time of 1 token) for b prompts of 32 tokens, N = 49. prefill: time of 1 token.
mixed: 16 requests of 512 tokens, 64 new each, Poisson arrivals; tokens generated over the time of all.
Beside tokens a second stand CPU milliseconds a token (all threads of the process), which other work on the machine
disturbs less; of threads that spin while they wait they say little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any, Protocol

VOCAB = 49152
NEW = 49
CONTEXT = 32
SHAPES = {"prefill1": (1, 1024), "prefill8": (8, 256)}


class Engine(Protocol):
    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        """Greedy tokens of ``prompts``, together, exactly ``num_new`` each."""
        ...

    def serve(self, arrivals: list[tuple[float, list[int]]], num_new: int) -> float:
        """Serve prompts that arrive at their times; seconds until all are done."""
        ...


class Transformers:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        ids = self._torch.tensor(prompts)
        with self._torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_new,
                min_new_tokens=num_new,
                do_sample=False,
                pad_token_id=0,
            )
        return [row.tolist() for row in out[:, ids.shape[1] :]]

    def serve(self, arrivals: list[tuple[float, list[int]]], num_new: int) -> float:
        raise SystemExit("transformers has no continuous batching here")


class Vllm:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm import LLM

        self._llm = LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=os.environ.get("VLLM_EAGER", "1") == "1",
            enable_prefix_caching=False,
            max_model_len=2048,
            max_num_seqs=32,
            block_size=64,
        )

    def _params(self, num_new: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False)

    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = self._llm.generate(asked, self._params(num_new), use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    def serve(self, arrivals: list[tuple[float, list[int]]], num_new: int) -> float:
        engine, todo = self._llm.llm_engine, list(arrivals)
        start, number = time.perf_counter(), 0
        while todo or engine.has_unfinished_requests():
            while todo and todo[0][0] <= time.perf_counter() - start:
                prompt = todo.pop(0)[1]
                engine.add_request(f"mixed-{number}", {"prompt_token_ids": prompt}, self._params(num_new))
                number += 1
            if engine.has_unfinished_requests():
                engine.step()
            else:
                time.sleep(0.001)
        return time.perf_counter() - start


class Tanghulu:
    def __init__(self, model: str, dtype: str, threads: int) -> None:
        from tanghulu.workers.compute.process_tuning import wait_shortly

        wait_shortly()  # as a worker does
        import torch

        torch.set_num_threads(threads)
        from tanghulu.workers.compute.models.model import dtype_name, load_model, pick_dtype
        from tanghulu.workers.compute.runners import ThreadedRunner, TorchRunner
        from tanghulu.workers.engine.engine import EngineCore
        from tanghulu.workers.engine.kv_layout import KvLayout
        from tanghulu.workers.engine.scheduler import EngineCoreConfig
        from tanghulu.workers.weights import resolve_model

        loaded = load_model(resolve_model(model), pick_dtype(dtype))
        budget = int(os.environ.get("MAX_NUM_BATCHED_TOKENS", "512"))
        layout = KvLayout.of(loaded.config, 64, dtype_name(loaded.dtype))
        runner = TorchRunner(loaded, layout, layout.num_blocks_in(512 << 20))
        self._core = EngineCore(ThreadedRunner(runner, threads), EngineCoreConfig(max_num_batched_tokens=budget))
        self._number = 0

    def _add(self, prompt: list[int], num_new: int) -> None:
        from tanghulu.hashing import TokenSequence, root_hash
        from tanghulu.session.sampling import Sampling, StopRule
        from tanghulu.types import Fingerprint, RequestId
        from tanghulu.workers.engine.requests import EngineRequest

        self._number += 1
        root = root_hash(Fingerprint(self._number.to_bytes(16, "little")))
        self._core.add(
            EngineRequest(
                RequestId(str(self._number)),
                TokenSequence(root, 64, prompt),
                len(prompt),
                Sampling(temperature=0),
                StopRule(num_new, ignore_eos=True),
            )
        )

    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        first = self._number + 1
        for prompt in prompts:
            self._add(prompt, num_new)
        tokens: dict[str, list[int]] = {}
        while self._core.scheduler.has_work:
            for output in self._core.step().outputs:
                tokens.setdefault(output.request_id, []).extend(output.tokens)
        return [tokens[str(first + index)] for index in range(len(prompts))]

    def serve(self, arrivals: list[tuple[float, list[int]]], num_new: int) -> float:
        todo, start = list(arrivals), time.perf_counter()
        while todo or self._core.scheduler.has_work:
            while todo and todo[0][0] <= time.perf_counter() - start:
                self._add(todo.pop(0)[1], num_new)
            if self._core.scheduler.has_work:
                self._core.step()
            else:
                time.sleep(0.001)
        return time.perf_counter() - start


ENGINES = {"transformers": Transformers, "vllm": Vllm, "tanghulu": Tanghulu}


def prompts_of(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(100, VOCAB) for _ in range(length)] for _ in range(count)]


Spent = tuple[float, float]
"""Seconds on the clock and on the CPUs."""


def timed(engine: Engine, prompts: list[list[int]], num_new: int) -> Spent:
    start, cpu = time.perf_counter(), time.process_time()
    got = engine.generate(prompts, num_new)
    spent = time.perf_counter() - start, time.process_time() - cpu
    assert [len(each) for each in got] == [num_new] * len(prompts), "the engine made fewer tokens than it was asked for"
    return spent


def decode_spent(engine: Engine, rng: random.Random, batch: int) -> tuple[int, Spent]:
    first = timed(engine, prompts_of(rng, batch, CONTEXT), 1)
    whole = timed(engine, prompts_of(rng, batch, CONTEXT), NEW)
    return batch * (NEW - 1), (whole[0] - first[0], whole[1] - first[1])


def mixed_spent(engine: Engine, rng: random.Random, per_s: float) -> tuple[int, Spent]:
    at, arrivals = 0.0, []
    for prompt in prompts_of(rng, 16, 512):
        arrivals.append((at, prompt))
        at += rng.expovariate(per_s)
    cpu = time.process_time()
    seconds = engine.serve(arrivals, 64)
    return 16 * 64, (seconds, time.process_time() - cpu)


def measure(engine: Engine, what: str, rng: random.Random) -> tuple[int, Spent]:
    """How many tokens, and what they took."""
    if what.startswith("decode"):
        return decode_spent(engine, rng, int(what.removeprefix("decode")))
    if what == "mixed":
        return mixed_spent(engine, rng, 1.0)
    count, length = SHAPES[what]
    return count * length, timed(engine, prompts_of(rng, count, length), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--what", default="decode1,decode8,prefill1,prefill8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    started = time.perf_counter()
    engine: Engine = ENGINES[args.engine](args.model, args.dtype, args.threads)
    rng = random.Random(args.seed)
    timed(engine, prompts_of(rng, 2, 32), 4)
    load_s = time.perf_counter() - started
    for number in range(args.rounds):
        for what in args.what.split(","):
            tokens, (seconds, cpu_s) = measure(engine, what, rng)
            line = {"engine": args.engine, "dtype": args.dtype, "what": what, "round": number}
            line |= {"tokens_per_s": tokens / seconds, "cpu_ms_per_token": cpu_s / tokens * 1e3}
            print("ROW " + json.dumps(line | {"start_s": load_s, "load_average": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
