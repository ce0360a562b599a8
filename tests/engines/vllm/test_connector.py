"""Two vLLM processes, one behind the other, and a store: the second loads what the first has computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tanghulu
from tanghulu.hashing import VLLM_SHA256_CBOR, TokenSequence, as_tokens, root_hash, vllm_salt
from tanghulu.types import BlockHash, Fingerprint
from tests.engines.vllm.conftest import MODEL, Vllm
from tests.store.cluster import Cluster

pytestmark = [pytest.mark.engine_vllm, pytest.mark.timeout(2000)]
HERE = Path(__file__).parent
BLOCK_TOKENS = 64
#: Tokens of SmolLM2 that stand for text, not for structure.
ORDINARY = (1000, 40_000)


def prompts_of_2000_tokens() -> list[list[int]]:
    """Four; the first two share 1,024 tokens."""
    random = np.random.default_rng(0)
    shared = random.integers(*ORDINARY, 1024).tolist()
    two = [shared + random.integers(*ORDINARY, 976).tolist() for _ in range(2)]
    return two + [random.integers(*ORDINARY, 2000).tolist() for _ in range(2)]


def test_another_process_loads_the_prefix_and_says_the_same(vllm: Vllm, store: Cluster) -> None:
    prompts = prompts_of_2000_tokens()
    # In float32: where a prefill is cut otherwise, bfloat16 may round to another token after a dozen.
    spec = {"model": str(MODEL), "dtype": "float32", "connector": {"master": store.address}, "prompts": prompts}
    engine = HERE / "engine_process.py"
    *cold, end = vllm.run(engine, spec)
    assert end == {"unpinned": True}, "blocks stay pinned after their saves"
    assert [each["cached"] for each in cold] == [0, 1024, 0, 0], "its own prefix cache"
    *loaded, end = vllm.run(engine, spec)
    assert end == {"unpinned": True}
    assert [each["answered"] for each in loaded] == [each["answered"] for each in cold]
    assert all(each["cached"] >= 1920 for each in loaded), loaded
    print([(one["ttft_s"], two["ttft_s"]) for one, two in zip(cold, loaded, strict=True)])

    with tanghulu.connect(store.address) as client:
        for prompt, block in zip(prompts[1:], (5, 0, 30), strict=True):
            spoil(client, names_of(prompt)[block])
    *broken, end = vllm.run(engine, spec | {"prompts": prompts[1:]})
    assert end == {"unpinned": True}
    assert [each["answered"] for each in broken] == [each["answered"] for each in cold[1:]]


def test_a_gpus_way_and_a_cpus_share_blocks(vllm: Vllm, store: Cluster) -> None:
    """What is saved through rings is loaded through them and into main memory, under vLLM's own calls."""
    prompt = prompts_of_2000_tokens()[2][:500]
    plain = {"model": str(MODEL), "dtype": "float32", "connector": {"master": store.address}, "prompts": [prompt]}
    transfer = {
        "kv_connector": "RingedConnector",
        "kv_connector_module_path": "tests.engines.vllm.ringed_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": plain["connector"],
    }
    engine = HERE / "engine_process.py"
    with vllm.running(engine, {key: plain[key] for key in plain if key != "connector"} | {"transfer": transfer}) as one:
        first, end = one.hear(), one.hear()
        assert (first["cached"], end) == (0, {"unpinned": True}), "blocks stay pinned after their saves"
        (again,) = one.ask(prompts=[prompt])["answers"]
    (loaded, _) = vllm.run(engine, plain)
    assert [first["answered"]] * 2 == [again["answered"], loaded["answered"]]
    assert [again["cached"], loaded["cached"]] == [448, 448]


def names_of(prompt: list[int]) -> list[BlockHash]:
    """Our names of the prompt's blocks, by which a conductor would look for them."""
    root = root_hash(Fingerprint(b""), b"", VLLM_SHA256_CBOR)
    return TokenSequence(root, BLOCK_TOKENS, prompt, VLLM_SHA256_CBOR).block_hashes


def spoil(client: tanghulu.Client, name: BlockHash) -> None:
    """Put something else in the block's place: it is found, and its load fails."""
    (key,) = [info.key for info in client.list_keys("kv/") if info.key.split("/")[2] == name.hex()]
    client.remove(key)
    assert client.put(key, b"no block")


def test_vllm_names_blocks_as_we_do(vllm: Vllm) -> None:
    random = np.random.default_rng(1)
    asked = [
        (random.integers(0, 150_000, random.integers(1, 600)).tolist(), block_tokens, salt)
        for block_tokens in (16, 64, 128)
        for salt in (b"", b"tenant a")
        for _ in range(17)
    ]
    sent = [(tokens, block_tokens, vllm_salt(salt) or None) for tokens, block_tokens, salt in asked]
    theirs = vllm.run(HERE / "vllm_hashes.py", sent)
    for (tokens, block_tokens, salt), expected in zip(asked, theirs, strict=True):
        root = root_hash(Fingerprint(b""), salt, VLLM_SHA256_CBOR)
        ours = TokenSequence(root, block_tokens, as_tokens(tokens), VLLM_SHA256_CBOR).block_hashes
        assert [each.hex() for each in ours] == expected
