"""Files with a key, a type, a tensor or a byte out of place: loaded as they should be, or refused by one line."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tanghulu.errors import ModelUnsupported
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.weights import fingerprint, resolve_model
from tanghulu.workers.weights.gguf_config import config_from_gguf
from tanghulu.workers.weights.gguf_file import GgufFile
from tanghulu.workers.weights.gguf_tokenizer import build_gguf_tokenizer
from tanghulu.workers.weights.lora import LoraAdapter
from tanghulu.workers.weights.tokenizer_assets import load_tokenizer_assets
from tests.workers.tiny import TinyModel, write_tiny
from tests.workers.weights import hub
from tests.workers.weights.gguf_files import write_gguf
from tests.workers.weights.hub import ANYTHING
from tests.workers.weights.test_lora import write_adapter

#: What llama.cpp reads of a llama's metadata and would compute otherwise.
GGUF_REFUSED: dict[str, Any] = {
    "llama.rope.scaling.type": "yarn",
    "llama.rope.dimension_count": 4,
    "llama.attention.value_length": 4,
    "llama.attention.causal": False,
    "llama.attention.clamp_kqv": 8.0,
    "llama.attention.scale": 0.5,
    "llama.attention.head_count": [6, 6, 3],
    "llama.feed_forward_length": [80, 80, 40],
    "llama.expert_count": 4,
    "llama.logit_scale": 0.5,
    "llama.residual_scale": 0.5,
    "llama.embedding_scale": 12.0,
    "llama.unheard_of": 1,
    "adapter.type": "lora",
    "general.type": "adapter",
    "general.alignment": 0,
}
GGUF_NEUTRAL = [
    *(["llama.rope.scaling.type", kind] for kind in ("linear", "none")),
    *([f"llama.rope.{name}", 1] for name in ("scaling.factor", "scale_linear")),
    *(["llama.attention.sliding_window", value] for value in (0, 10**6)),
]
GGUF_TOKENIZER_REFUSED: dict[str, Any] = {
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.add_eos_token": True,
    "tokenizer.ggml.precompiled_charsmap": [1],
    "tokenizer.ggml.bos_token_id": 10_000,
    "tokenizer.ggml.merges": ["nobody knows"],
    "tokenizer.ggml.token_type": [1, 2],
    "tokenizer.ggml.unheard_of": "x",
}


@pytest.fixture
def folder(tiny: TinyModel, tmp_path: Path) -> Path:
    """A model with a tokenizer, its two side files and generation_config.json."""
    path = write_tiny(tmp_path).path
    tokenizer = Tokenizer(
        models.BPE({text: at for at, text in enumerate(["<s>", "</s>", "h", "i", "hi"])}, [("h", "i")])
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "{{ bos_token }}"}))
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    (path / "added_tokens.json").write_text(json.dumps({"<x>": 5}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1], "temperature": 0.6}))
    return path


@pytest.fixture
def head(tiny: TinyModel, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A GGUF file with a byte-level vocabulary, and its metadata."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "12"]

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_list(tokens)
        writer.add_token_types([1] * (len(tokens) - 2) + [3, 1])
        writer.add_token_merges(["1 2"])
        writer.add_bos_token_id(len(tokens) - 2)
        writer.add_chat_template("{{ bos_token }}")

    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, metadata=vocabulary)
    with contextlib.closing(GgufFile(path)) as file:
        return path, file.metadata


def test_the_files_load_as_they_are(folder: Path, head: tuple[Path, dict[str, Any]]) -> None:
    assets = load_tokenizer_assets(resolve_model(str(folder)))
    assert (assets.bos_token, assets.eos_token, assets.eos_ids) == ("<s>", "</s>", (1,))
    assert Tokenizer.from_buffer(assets.tokenizer_json).encode("<x>hi").ids == [5, 4]
    of_gguf = load_tokenizer_assets(resolve_model(str(head[0])))
    assert (of_gguf.bos_token, of_gguf.chat_template) == ("<s>", "{{ bos_token }}")


def test_no_value_in_gguf_metadata_is_a_traceback(head: tuple[Path, dict[str, Any]]) -> None:
    _, metadata = head
    names = [
        f"llama.{name}" for name in ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "vocab_size")
    ]
    for key in [*metadata, *names, *GGUF_REFUSED, *GGUF_TOKENIZER_REFUSED, "split.count"]:
        for value in ANYTHING:
            with contextlib.suppress(ModelUnsupported):
                assert config_from_gguf(metadata | {key: value}, ()).num_layers >= 1
            with contextlib.suppress(ModelUnsupported):
                build_gguf_tokenizer(metadata | {key: value})


def test_no_number_in_gguf_metadata_is_passed_over(head: tuple[Path, dict[str, Any]]) -> None:
    """Another value of a key is refused or gives another model; or it is one that changes nothing."""
    _, metadata = head
    base = config_from_gguf(metadata, ())
    more = ("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "attention.sliding_window", "logit_scale")
    for key in {*(key for key in metadata if key.startswith("llama.")), *(f"llama.{name}" for name in more)}:
        for value in [*ANYTHING, 0.5, 3, 40, "none"]:
            with contextlib.suppress(ModelUnsupported):
                is_other = config_from_gguf(metadata | {key: value}, ()) != base
                is_empty = value is None or value is False or value in ("", [], {})
                assert is_other or is_empty or [key, value] in GGUF_NEUTRAL or value == metadata.get(key), (key, value)


@pytest.mark.parametrize("key", [*GGUF_REFUSED])
def test_what_llama_cpp_computes_otherwise_is_refused(key: str, head: tuple[Path, dict[str, Any]]) -> None:
    if key == "general.alignment":  # of the file, read with its head
        raw = head[0].read_bytes()
        pair = _string("general.alignment") + np.uint32(4).tobytes() + np.uint32(0).tobytes()
        head[0].write_bytes(
            raw[:16] + (int.from_bytes(raw[16:24], "little") + 1).to_bytes(8, "little") + pair + raw[24:]
        )
        with pytest.raises(ModelUnsupported, match=key):
            resolve_model(str(head[0]))
        return
    with pytest.raises(ModelUnsupported, match=rf"{key}'|rope scaling 'yarn'"):
        config_from_gguf(head[1] | {key: GGUF_REFUSED[key]}, ())


def _string(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode()


@pytest.mark.parametrize("key", [*GGUF_TOKENIZER_REFUSED])
def test_a_vocabulary_that_would_be_cut_otherwise_is_refused(key: str, head: tuple[Path, dict[str, Any]]) -> None:
    build_gguf_tokenizer(head[1])
    with pytest.raises(ModelUnsupported, match=rf"{key}|vocabulary"):
        build_gguf_tokenizer(head[1] | {key: GGUF_TOKENIZER_REFUSED[key]})


def test_no_byte_in_the_head_of_a_gguf_file_is_a_traceback(head: tuple[Path, dict[str, Any]]) -> None:
    path, _ = head
    whole, dice = path.read_bytes(), random.Random(6)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(dice.choice((1, 1, 4))):
            damaged[dice.randrange(9000)] = dice.choice((0, 1, 9, 65, 127, 255))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelUnsupported):
            load_model(source := resolve_model(str(path)), torch.float32)
            load_tokenizer_assets(source)


def test_a_gguf_tensor_without_dimensions_is_refused(head: tuple[Path, dict[str, Any]]) -> None:
    path, _ = head
    name, before = _string("output_norm.weight"), path.read_bytes()
    at = before.index(name) + len(name)
    path.write_bytes(before[:at] + bytes(4) + before[at + 4 + 8 :])  # its one dimension, and the size of that
    with pytest.raises(ModelUnsupported, match="0 dimensions"):
        load_model(resolve_model(str(path)), torch.float32)


def _mutated(values: dict[str, Any], *more: str) -> Iterator[dict[str, Any]]:
    yield from (values | {key: value} for key in (*values, *more) for value in ANYTHING)
    for key, value in values.items():
        if isinstance(value, dict):
            yield from (values | {key: inner} for inner in _mutated(value))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (
            "tokenizer_config.json",
            ("added_tokens_decoder", "extra_special_tokens", "pad_token", "add_bos_token", "x_token"),
        ),
        ("special_tokens_map.json", ("additional_special_tokens", "unk_token")),
        ("added_tokens.json", ()),
        ("generation_config.json", ("top_k", "top_p", "min_p")),
        ("model.safetensors.index.json", ("weight_map",)),
    ],
)
def test_no_value_in_a_side_file_is_a_traceback(name: str, more: tuple[str, ...], folder: Path) -> None:
    path = folder / name
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").rename(folder / "other.safetensors")
    good = json.loads(path.read_text()) if path.exists() else {}
    for values in [*_mutated(good, *more), *ANYTHING]:
        path.write_text(json.dumps(values))
        with contextlib.suppress(ModelUnsupported):
            load_tokenizer_assets(resolve_model(str(folder)))
    path.write_bytes(b"[" * 100_000)
    with pytest.raises(ModelUnsupported, match=name):
        load_tokenizer_assets(resolve_model(str(folder)))


def test_a_broken_tokenizer_is_named(folder: Path) -> None:
    good = json.loads((folder / "tokenizer.json").read_text())
    for values in [*_mutated(good), *ANYTHING]:
        (folder / "tokenizer.json").write_text(json.dumps(values))
        with contextlib.suppress(ModelUnsupported):
            load_tokenizer_assets(resolve_model(str(folder)))
    (folder / "tokenizer.json").write_text(json.dumps(good | {"model": good["model"] | {"dropout": 0.5}}))
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json has 'dropout' = 0\.5"):
        load_tokenizer_assets(resolve_model(str(folder)))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json"):
        load_tokenizer_assets(resolve_model(str(folder)))


def test_no_value_in_an_adapter_is_a_traceback(tiny: TinyModel, tmp_path: Path) -> None:
    adapter = write_adapter(tiny, tmp_path / "adapter")
    path = adapter / "adapter_config.json"
    good = json.loads(path.read_text())
    for values in [*_mutated(good, "use_rslora", "init_lora_weights", "unheard_of"), *ANYTHING]:
        path.write_text(json.dumps(values))
        with contextlib.suppress(ModelUnsupported):
            found = LoraAdapter.of(f"mine={adapter}")
            assert found is not None
            assert found.scale > 0


@pytest.mark.parametrize(
    "target", ["model.layers.1.mlp.gate_proj.bias", "model.layers.2.self_attn.q_proj.bias", "score"]
)
def test_a_tensor_that_nobody_takes_is_named(target: str, tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    ignored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(tensors | ignored, tmp_path / "model.safetensors")
    tiny.load()
    save_file(tensors | {target: torch.zeros(80)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=target):
        tiny.load()


@pytest.mark.parametrize("name", ["blk.1.ffn_gate.bias", "blk.2.attn_q.bias", "blk.1.attn_q_norm.weight"])
def test_a_gguf_tensor_that_nobody_takes_is_named(name: str, tiny: TinyModel, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(tiny, path, tensors={name: np.zeros(8, np.float32)})
    with pytest.raises(ModelUnsupported, match=name):
        load_model(resolve_model(str(path)), torch.float32)


def test_frequency_factors_of_another_length_are_refused(tiny: TinyModel, tmp_path: Path) -> None:
    for factors in (np.ones(3, np.float32), np.zeros(4, np.float32)):
        write_gguf(tiny, tmp_path / "tiny.gguf", rope_freqs=factors)
        with pytest.raises(ModelUnsupported, match=r"rope_freqs\.weight"):
            load_model(resolve_model(str(tmp_path / "tiny.gguf")), torch.float32)


@pytest.mark.parametrize("scaling", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_linear(scaling: str, tiny: TinyModel, tmp_path: Path) -> None:
    path, hugging = tmp_path / "tiny.gguf", write_tiny(tmp_path, rope_scaling={"rope_type": "linear", "factor": 4.0})
    write_gguf(tiny, path, metadata=lambda writer: writer.add_float32(f"llama.{scaling}", 4.0))
    assert torch.equal(hub.ours(path), hub.ours(hugging.path))


def test_ends_that_gguf_has_by_name() -> None:
    metadata = {
        "general.architecture": "llama",
        **{f"llama.{key}": 8 for key in ("block_count", "embedding_length", "feed_forward_length", "context_length")},
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.tokens": ["a", "<|im_end|>", "<|eot_id|>"],
    }
    assert config_from_gguf(metadata, ()).eos_ids == {1, 2}
    assert config_from_gguf(metadata | {"tokenizer.ggml.eot_token_id": 0}, ()).eos_ids == {0}


def test_two_files_with_one_tensor(tiny: TinyModel, tmp_path: Path) -> None:
    """transformers reads model.safetensors, whatever else there is; without it two copies are one too many."""
    path = write_tiny(tmp_path, seed=1).path
    expected = hub.ours(path)
    other = tiny.path / "model.safetensors"
    (path / "zz.safetensors").write_bytes(other.read_bytes())
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "zz.safetensors"}}))
    assert torch.equal(hub.ours(path), expected)
    (path / "model.safetensors.index.json").unlink()
    (path / "model.safetensors").rename(path / "aa.safetensors")
    with pytest.raises(ModelUnsupported, match=r"aa\.safetensors and in .*zz\.safetensors"):
        hub.ours(path)


def test_a_second_head_of_a_tied_model(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, tie_word_embeddings=True).path
    expected, tensors = hub.ours(path), load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path / "model.safetensors")
    assert torch.equal(hub.ours(path), expected)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, path / "model.safetensors")
    with pytest.raises(ModelUnsupported, match=r"lm_head\.weight.*tie_word_embeddings"):
        hub.ours(path)


def test_fingerprints_of_configs_whose_kv_differs(tmp_path: Path) -> None:
    path, names = write_tiny(tmp_path).path, set()
    config = json.loads((path / "config.json").read_text())
    for changes in ({}, {"attention_bias": True}, {"model_type": "qwen2"}, {"model_type": "qwen3"}, {"head_dim": 16}):
        hub.change(path, config | changes)
        names.add(fingerprint(resolve_model(str(path)), dtype="float32", block_tokens=16))
    assert len(names) == 5


def test_tokenizers_without_truncation_and_padding(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9, pad_token="<s>")
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    read = Tokenizer.from_buffer(load_tokenizer_assets(resolve_model(str(folder))).tokenizer_json)
    assert read.encode("hihihi").ids == [4, 4, 4]
