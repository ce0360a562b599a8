"""vLLM's block hashes: CBOR by its specification, hashes as its own code with cbor2 made them."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import (
    VLLM_SHA256_CBOR,
    BlockExtras,
    Media,
    TokenSequence,
    cbor,
    root_hash,
    vllm_chain_hashes,
    vllm_event_hash,
    vllm_root_hash,
    vllm_salt,
)
from tanghulu.types import Fingerprint

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
        (-1, "20"),
        (-500, "3901f3"),
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


#: By vLLM 0.32 itself, for adapter sql of /adapters/sql; then with salt tenant, cat at 2 to 5, dog at 7 to 12.
WITH_LORA = "daac6fb5d87cfb3f615f15e8e3f27fedd918830d783e3e2f998fb05199f8aec8"
WITH_ALL = [
    "94a784eb250815702a6105f8878aaea128f77c98d7709e1f58fbfcff35e90f16",
    "0501f4029e863a4fffd40ce81ec524f7d0617ab57a03b50b29cae1dfda1ae186",
    "29c8d180481393cfb113101f6c2b8f692075a564ed4e7a9825674786da4a6dfa",
    "925db971e69c0551723b56014d1b044c6c7b1e0ab48b26d2ed52edc9bc85eaf5",
]


def test_adapters_salts_and_media_are_part_of_vllms_names():
    root, media = vllm_root_hash("0"), (Media("cat", 2, 4), Media("dog", 7, 6))
    names = BlockExtras(lora="sql", lora_path="/adapters/sql").hashes(root, TOKENS, 4, VLLM_SHA256_CBOR)
    assert names[0].hex() == WITH_LORA
    names = BlockExtras("tenant", "sql", "/adapters/sql", media).hashes(root, TOKENS, 4, VLLM_SHA256_CBOR)
    assert [each.hex() for each in names] == WITH_ALL
    assert BlockExtras().hashes(root, TOKENS, 4, VLLM_SHA256_CBOR) == vllm_chain_hashes(root, TOKENS, 4)


def test_other_names_differ_from_where_the_prompts_do():
    root = root_hash(Fingerprint(bytes(16)))

    def names(**extras):
        return BlockExtras(**extras).hashes(root, TOKENS, 4, "xxh3_128")

    plain, cat, dog = names(), names(media=(Media("cat", 5, 2),)), names(media=(Media("dog", 5, 2),))
    assert cat[0] == dog[0]
    assert not {*cat[1:]} & {*dog[1:]}
    different = [plain, names(salt="a"), names(lora="a"), names(lora="a", lora_path="b"), cat]
    assert len({each[0] for each in different}) == len(different)
    assert names(media=(Media("far", 1 << 30, 9),))[0] == cat[0], "media behind the prompt change nothing before"


#: Tokens around the places where CBOR's numbers grow by a byte.
EDGES = st.sampled_from([0, 23, 24, 255, 256, 65_535, 65_536, 2**32 - 1]) | st.integers(0, 2**32 - 1)


@given(st.lists(EDGES, max_size=90), st.sampled_from([1, 2, 23, 24, 32]), st.none() | st.text(min_size=1, max_size=5))
def test_a_chain_is_hash_over_hash_of_each_blocks_cbor(values, block_tokens, salt):
    """The definition, block by block; the chain itself is cut and encoded all at once."""
    tokens, expected, parent = np.array(values, np.uint32), [], vllm_root_hash()
    extra = (("cache_salt", salt),) if salt else None
    for number in range(len(values) // block_tokens):
        own = tuple(values[number * block_tokens : (number + 1) * block_tokens])
        parent = hashlib.sha256(cbor((parent, own, extra if number == 0 else None))).digest()
        expected.append(parent)
    assert vllm_chain_hashes(vllm_root_hash(salt=(salt or "").encode()), tokens, block_tokens) == expected
    assert vllm_chain_hashes(vllm_root_hash(), tokens, block_tokens, [extra]) == expected


def test_a_sequence_names_its_blocks_as_vllm_does():
    model = Fingerprint(b"m" * 16)
    sequence = TokenSequence(root_hash(model, b"tenant", VLLM_SHA256_CBOR), 4, TOKENS[:6], VLLM_SHA256_CBOR)
    sequence.append(TOKENS[6:])
    given = (("cache_salt", vllm_salt(b"tenant")),)
    assert sequence.block_hashes == vllm_chain_hashes(vllm_root_hash(), TOKENS, 4, [given])
    assert root_hash(model, b"", VLLM_SHA256_CBOR) == vllm_root_hash(), "vLLM's own where nothing is to be kept apart"
    assert root_hash(model, b"\xff", VLLM_SHA256_CBOR) != root_hash(model, b"\xfe", VLLM_SHA256_CBOR)
    assert root_hash(model, b"", VLLM_SHA256_CBOR, b"key") != vllm_root_hash()
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        vllm_root_hash(salt=b"\xff")
