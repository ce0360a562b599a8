"""vLLM's block hashes: CBOR by its specification, hashes as its own code with cbor2 made them."""

import numpy as np
import pytest

from tanghulu.hashing import cbor, vllm_chain_hashes, vllm_event_hash, vllm_root_hash

TOKENS = np.arange(0, 70_000, 4375, dtype=np.uint32)
ROOT = "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
PLAIN = [
    "62c14f222428ca0eca883523cd02a3629af2a7fcfe6d97518bb759200b03ff53",
    "01087525b57dc453ce94f7b3b730164fca7b97d86cfd1753bf9e92e097c202d9",
    "53ebb8539ae5a90c11ce7b2fedbd1015d60f99741e2516e32c098862f0e4b7c7",
    "11dbcfb262a13a73efef2f52c9c45aaf906ae6b1413ea6747835da71065ce94f",
]
SALTED = [
    "146f5f26f06da783adfd8773bce0449a7bf6a4e3e283e0724e801d7773c18f7c",
    "ca260a4bb8774efc8ec17b6c3eff1be2385ff450e18f160c81654ee10580530e",
    "bde0e23f5103026e6c0f327f7be8ed3c38710876b2c3a4c78a2182742740f0ba",
    "75a7c5e06517d9536596e461b4c4311545c978122943050674e4c63753df1528",
]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "00"),
        (23, "17"),
        (24, "1818"),
        (255, "18ff"),
        (256, "190100"),
        (65_535, "19ffff"),
        (65_536, "1a00010000"),
        (2**32 - 1, "1affffffff"),
        (2**32, "1b0000000100000000"),
        ("é", "62c3a9"),
        (b"x" * 300, "59012c" + "78" * 300),
        (
            tuple(range(30)),
            "981e" + "".join(f"{n:02x}" for n in range(24)) + "181818191 81a181b181c181d".replace(" ", ""),
        ),
        (None, "f6"),
        ((1, ("a", None)), "8201826161f6"),
    ],
)
def test_cbor(value, expected):
    assert cbor(value).hex() == expected


def test_block_hashes():
    root = vllm_root_hash("0")
    assert root.hex() == ROOT
    assert [h.hex() for h in vllm_chain_hashes(root, TOKENS, 4)] == PLAIN
    salted = vllm_chain_hashes(root, TOKENS[:15], 4, [(("cache_salt", "tenant"),)])
    assert [h.hex() for h in salted] == SALTED[:3]
    assert vllm_event_hash(vllm_chain_hashes(root, TOKENS, 4)[-1]) == 8662069637289929039
    assert vllm_chain_hashes(root, TOKENS[:3], 4) == []
