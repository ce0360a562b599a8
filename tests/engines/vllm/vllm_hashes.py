"""Runs in vLLM's environment: vLLM's own names of the blocks of prompts, in hex, a line a prompt."""

from __future__ import annotations

import json
import sys

from vllm import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

init_none_hash(sha256_cbor)
for tokens, block_tokens, salt in json.load(sys.stdin):
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(block_tokens, sha256_cbor),
    )
    print(json.dumps([each.hex() for each in request.block_hashes]))
