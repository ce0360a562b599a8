"""A plain SGLang server as seen from outside; ``incremental``: events carry the new tokens only; ``kv_events`` are the
addresses of its cache's events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conductor.engines.fake_vllm import CONTEXT, FakeVllm

PAGE = 8


class FakeSglang(FakeVllm):
    """As ``FakeVllm``, in SGLang's terms."""

    engine, generate_path = "sglang", "/generate"

    def __init__(self, folder: Path, *, incremental: bool = False, kv_events: dict[str, Any] | None = None) -> None:
        super().__init__(folder)
        self.incremental, self.kv_events = incremental, kv_events
        #: Of each token; null stands for the logarithm of zero.
        self.logprob: float | None = -0.5

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        match path:
            case "/ready":
                return self.health, ""
            case "/v1/models":
                return 200, {"data": [{"id": self.name, "root": "x", "max_model_len": CONTEXT}]}
            case "/server_info":
                info = {"model_path": str(self.folder), "page_size": PAGE, "max_total_num_tokens": 4096}
                return 200, {**info, "max_running_requests": 32, "kv_events": self.kv_events}
            case "/metrics":
                return 200, f"sglang:num_running_reqs {self.open_streams}\nsglang:token_usage 0.5\n"
        return 404, {"detail": "Not Found"}

    def _as_completion(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        named = {"prompt": body["input_ids"], "max_tokens": params["max_new_tokens"], "stream": True}
        return {**params, **named, "logprobs": 1 if body.get("return_logprob") else None}

    def _token_event(
        self, body: dict[str, Any], ids: list[int], num: int, reason: str | None, cached: int
    ) -> dict[str, Any]:
        ends = {None: None, "stop": {"type": "stop", "matched": ids[-1]}, "length": {"type": "length", "length": num}}
        ends["abort"] = {"type": "abort", "message": "gone", "status_code": 503}
        meta: dict[str, Any] = {"finish_reason": ends[reason], "completion_tokens": num, "cached_tokens": cached}
        told = ids[-1:] if self.incremental else ids[len(ids) - num :]
        if body["logprobs"]:
            meta["output_token_logprobs"] = [[self.logprob, each, None] for each in told]
            meta["output_top_logprobs"] = [[[-0.5, each, None]] for each in told]
        return {"text": "", "output_ids": told, "meta_info": meta}
