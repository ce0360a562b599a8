"""LoRA adapters: merged as PEFT computes them, refused where they are something else, with KV of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tanghulu.errors import ConfigError, ModelUnsupported
from tanghulu.workers.compute.forward_batch import SequenceChunk, build_forward_batch
from tanghulu.workers.compute.kv_cache import KvCache
from tanghulu.workers.compute.models.model import load_model
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.weights import fingerprint, resolve_model
from tests.workers.tiny import BLOCK, TinyModel, engine, request, run_all, write_tiny
from tests.workers.weights.gguf_files import write_gguf

PROMPT = [5, 17, 44, 8, 90, 3, 61, 22, 13]
TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def write_adapter(tiny: TinyModel, path: Path, **changes: Any) -> Path:
    """Write a random adapter of rank 4 for ``tiny`` under ``path``."""
    path.mkdir()
    generator = torch.Generator().manual_seed(9)
    tensors = {}
    for name, weight in load_file(tiny.path / "model.safetensors").items():
        if any(f"{target}.weight" in name for target in TARGETS):
            target = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{target}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.2
            tensors[f"{target}.lora_B.weight"] = torch.randn(len(weight), 4, generator=generator) * 0.2
    save_file(tensors, path / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 6,
        "target_modules": [target.rpartition(".")[2] for target in TARGETS],
        "bias": "none",
    }
    (path / "adapter_config.json").write_text(json.dumps(config | changes))
    return path


@pytest.fixture
def adapter(tiny: TinyModel, tmp_path: Path) -> Path:
    return write_adapter(tiny, tmp_path / "adapter")


def logits(spec: str, lora: str) -> torch.Tensor:
    model = load_model(resolve_model(spec, lora), torch.float32)
    cache = KvCache(KvLayout.of(model.config, BLOCK, "float32"), 4)
    return model.forward(build_forward_batch([SequenceChunk(PROMPT, 0, range(4), wants_logits=True)], BLOCK), cache)


def reference(tiny: TinyModel, adapter: Path, scale: float) -> Any:
    """The tiny model in transformers, which adds scale * B(A(x)) to what a product gives."""
    model, tensors = tiny.reference(), load_file(adapter / "adapter_model.safetensors")
    for key in tensors:
        if "lora_A" in key:
            down, up = tensors[key], tensors[key.replace("lora_A", "lora_B")]
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")

            def added(_: Any, inputs: Any, result: Any, down: Any = down, up: Any = up) -> Any:
                return result + scale * (inputs[0] @ down.T @ up.T)

            model.get_submodule(name).register_forward_hook(added)
    return model


@pytest.mark.parametrize(("changes", "scale"), [({}, 1.5), ({"use_rslora": True}, 3.0)])
def test_logits_equal_transformers_with_the_adapter(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, Any], scale: float
) -> None:
    adapter = write_adapter(tiny, tmp_path / "adapter", **changes)
    with torch.inference_mode():
        expected = reference(tiny, adapter, scale)(torch.tensor([PROMPT])).logits[0, -1:]
    got = logits(str(tiny.path), f"mine={adapter}")
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(got, logits(str(tiny.path), ""), atol=0.1)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers by old names
def test_logits_and_text_equal_pefts(tiny: TinyModel, adapter: Path) -> None:
    peft = pytest.importorskip("peft", reason="extra: peft is not installed")
    theirs = peft.PeftModel.from_pretrained(tiny.reference(), str(adapter)).eval()
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = theirs(ids).logits[0, -1:]
        for _ in range(20):
            ids = torch.cat((ids, theirs(ids).logits[:, -1:].argmax(-1)), dim=1)
    torch.testing.assert_close(logits(str(tiny.path), f"mine={adapter}"), expected, atol=1e-4, rtol=1e-4)
    core = engine(load_model(resolve_model(str(tiny.path), f"mine={adapter}"), torch.float32))
    core.add(request("a", PROMPT, 20))
    assert run_all(core) == {"a": ids[0, len(PROMPT) :].tolist()}


def test_a_gguf_base_takes_it_too(tiny: TinyModel, adapter: Path, tmp_path: Path) -> None:
    write_gguf(tiny, tmp_path / "tiny.gguf")
    torch.testing.assert_close(
        logits(str(tmp_path / "tiny.gguf"), f"mine={adapter}"), logits(str(tiny.path), f"mine={adapter}")
    )


def test_it_is_a_model_of_its_own(tiny: TinyModel, adapter: Path, tmp_path: Path) -> None:
    source = resolve_model(str(tiny.path), f"mine={adapter}")
    assert source.name == f"{tiny.path.name}:mine"
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 7}))
    sources = [resolve_model(str(tiny.path), lora) for lora in ("", f"mine={adapter}", f"mine={copy}")]
    assert len({fingerprint(each, dtype="float32", block_tokens=BLOCK) for each in sources}) == 3
    renamed = resolve_model(str(tiny.path), f"other={adapter}")
    assert fingerprint(renamed, dtype="float32", block_tokens=8) == fingerprint(source, dtype="float32", block_tokens=8)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"peft_type": "IA3"}, "IA3"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": 0}, "'r' = 0"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"init_lora_weights": "olora"}, "init_lora_weights"),
        ({"init_lora_weights": "corda"}, "init_lora_weights"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights"),
        ({"alora_invocation_tokens": [1, 1]}, "alora_invocation_tokens"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"target_modules": "("}, "target_modules"),
        ({"unheard_of": 3}, "unheard_of"),
    ],
)
def test_what_would_be_passed_over_is_refused(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    adapter = write_adapter(tiny, tmp_path / "adapter", **changes)
    with pytest.raises(ModelUnsupported, match=text):
        resolve_model(str(tiny.path), f"mine={adapter}")


def test_what_has_no_effect_is_accepted(tiny: TinyModel, tmp_path: Path) -> None:
    """An adapter_config.json with all that PEFT 0.17 writes."""
    nothing = ("auto_mapping", "corda_config", "eva_config", "exclude_modules", "layer_replication", "layers_pattern")
    nothing += ("layers_to_transform", "megatron_config", "modules_to_save", "revision", "target_parameters")
    off = dict.fromkeys(("fan_in_fan_out", "lora_bias", "use_dora", "use_qalora", "use_rslora"), False)
    written = {
        **dict.fromkeys((*nothing, "trainable_token_indices")),
        **off,
        **{"alpha_pattern": {}, "loftq_config": {}, "rank_pattern": {}},
        **{"base_model_name_or_path": "x", "inference_mode": True, "init_lora_weights": True, "lora_dropout": 0.05},
        **{"megatron_core": "megatron.core", "peft_version": "0.17.1", "qalora_group_size": 16},
    }
    adapter = write_adapter(tiny, tmp_path / "adapter", **written)
    plain = write_adapter(tiny, tmp_path / "plain", target_modules=r".*\.(q_proj|o_proj|gate_proj|down_proj)")
    assert torch.equal(logits(str(tiny.path), f"mine={adapter}"), logits(str(tiny.path), f"mine={plain}"))


@pytest.mark.parametrize("changes", [{"r": 8}, {"target_modules": ["q_proj"]}, {"target_modules": ".*q_proj"}])
def test_tensors_that_the_config_does_not_have_are_refused(
    tiny: TinyModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    adapter = write_adapter(tiny, tmp_path / "adapter", **changes)
    with pytest.raises(ModelUnsupported, match="the adapter's tensor"):
        load_model(resolve_model(str(tiny.path), f"mine={adapter}"), torch.float32)


def test_an_adapter_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    """Merged into the file's copy of the head, it would not be in the embedding that is computed with."""
    tied, adapter = write_tiny(tmp_path, tie_word_embeddings=True), tmp_path / "adapter"
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors", {"format": "pt"})
    write_adapter(tied, adapter, target_modules=["lm_head"])
    factors = {"A": torch.ones(4, embedding.shape[1]), "B": torch.ones(len(embedding), 4)}
    names = {f"base_model.model.lm_head.lora_{kind}.weight": factor for kind, factor in factors.items()}
    save_file(names, adapter / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=r"lm_head\.weight"):
        load_model(resolve_model(str(tmp_path), f"mine={adapter}"), torch.float32)


def test_tensors_without_a_place_are_named(tiny: TinyModel, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    for wrong, text in (
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": tensors[name]}, "layers.9.*no place"),
        ({"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": tensors[name]}, "no place"),
        ({name: tensors[name]}, "lacks A or B"),
        ({}, "lacks A or B of every weight"),
        (tensors | {name: torch.zeros(4, 3)}, "do not fit"),
    ):
        save_file({key: tensor.clone() for key, tensor in wrong.items()}, file)
        with pytest.raises(ModelUnsupported, match=text):
            load_model(resolve_model(str(tiny.path), f"mine={adapter}"), torch.float32)


def test_the_option(tiny: TinyModel, tmp_path: Path) -> None:
    for text in ("mine", "=dir", "a b=dir", "mine="):
        with pytest.raises(ConfigError, match="name=DIR"):
            resolve_model(str(tiny.path), text)
    with pytest.raises(ModelUnsupported, match=r"cannot read .*adapter_config\.json"):
        resolve_model(str(tiny.path), f"mine={tmp_path}")
    with pytest.raises(ConfigError, match="--engine torch"):
        WorkerConfig(engine="mock", lora="mine=dir")
