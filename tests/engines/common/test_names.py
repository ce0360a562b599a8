"""Names in the store: equal only where the bytes mean the same."""

from __future__ import annotations

from tanghulu.engines.common.names import block_keys, digest_of_weights, make_fingerprint
from tanghulu.types import parse_kv_chunk_key


def test_every_fact_counts_and_their_order_does_not():
    facts = {"dtype": "bfloat16", "config": {"rope_theta": 10000.0, "layers": [1, 2]}}
    assert make_fingerprint(facts) == make_fingerprint(dict(reversed(facts.items())))
    changed = [facts | {"dtype": "float32"}, facts | {"config": {"rope_theta": 1e6, "layers": [1, 2]}}]
    assert len({make_fingerprint(each) for each in [facts, *changed]}) == 3


def test_keys_are_those_that_the_conductor_reads():
    (key,) = block_keys(make_fingerprint({}), [bytes(range(32))], 1)
    assert parse_kv_chunk_key(key) == (make_fingerprint({})[:8].hex(), bytes(range(32)), 1)


def test_other_weights_have_another_digest(tmp_path):
    digests = {digest_of_weights("org/model", None), digest_of_weights("org/model", "v2")}
    for name, content in (("a", b"header 1"), ("b", b"header 2"), ("c", b"header 1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
        digests.add(digest_of_weights(str(tmp_path / name), None))
    assert len(digests) == 4
