"""Loads what the mock engine needs of a model: its tokenizer and its context length, never its weights.

``--model mock`` is a byte-level tokenizer made here, so that a cluster can be loaded on a machine without a model.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tanghulu.types import Fingerprint
from tanghulu.workers.engine.engine import ModelRunner
from tanghulu.workers.engine.kv_layout import ITEM_BYTES, KvLayout
from tanghulu.workers.loading.loaded_model import LoadedModel
from tanghulu.workers.mock.holding import HoldingRunner
from tanghulu.workers.mock.runner import MockRunner
from tanghulu.workers.mock.timing import TIMINGS
from tanghulu.workers.weights.fields import read_json
from tanghulu.workers.weights.hf_config import config_from_hf
from tanghulu.workers.weights.source import ModelSource, resolve_model
from tanghulu.workers.weights.tokenizer_assets import TokenizerAssets, load_tokenizer_assets

if TYPE_CHECKING:
    from tanghulu.workers.config import WorkerConfig

NAME = "mock"
_MAX_CONTEXT = 131_072
_END = "<|end|>"
_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif -%}"
)


def load(config: WorkerConfig, progress: Callable[[float], None]) -> LoadedModel:
    """Load the mock of ``config.model``; raises ModelUnsupported if that cannot be found."""
    name, assets, max_context = _described(config.model)
    layout = KvLayout(1, config.block_tokens, 1, config.mock_kv_token_bytes // (2 * ITEM_BYTES["float32"]), "float32")
    layout.num_blocks_in(config.kv_memory)
    tokenizer = Tokenizer.from_buffer(assets.tokenizer_json)
    timing = dataclasses.replace(TIMINGS[config.mock_timing], speedup=config.mock_speedup)
    text_ids = _text_ids(tokenizer, assets)
    progress(1.0)

    def make_runner(buffer: memoryview) -> ModelRunner:
        runner = MockRunner(
            layout,
            buffer,
            timing,
            text_ids=text_ids,
            vocab=tokenizer.get_vocab_size(),
            max_context=max_context,
            deterministic=config.deterministic,
            checks=config.checks,
        )
        return runner if config.mock_hold is None else HoldingRunner(runner, config.mock_hold)

    return LoadedModel(name, layout, _fingerprint(assets, layout), assets, make_runner)


def _described(spec: str) -> tuple[str, TokenizerAssets, int]:
    """Return the name, the tokenizer and the context length of the model ``spec``."""
    if spec == NAME:
        return NAME, byte_level(), _MAX_CONTEXT
    folder = Path(spec).expanduser()
    if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
        shape = config_from_hf(read_json(folder / "config.json"))
        source = ModelSource(folder.resolve().name, shape, (), folder)
    else:
        source = resolve_model(spec)
    return source.name, load_tokenizer_assets(source), source.config.max_context


def byte_level() -> TokenizerAssets:
    """Make a tokenizer with a token for each byte and one that ends a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END])
    return TokenizerAssets(tokenizer.to_str().encode(), _TEMPLATE, None, _END, False, None, (len(alphabet),))


def _text_ids(tokenizer: Tokenizer, assets: TokenizerAssets) -> list[int]:
    """Find tokens that read as words: lower-case letters, with a space in front where the tokenizer has such."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    spaced = sorted(index for text, index in vocabulary.items() if re.fullmatch("[Ġ▁][a-z]{2,}", text))
    letters = sorted(index for text, index in vocabulary.items() if re.fullmatch("[Ġ▁]?[a-z]*", text) and text)
    ending = set(assets.eos_ids)
    return spaced or letters or sorted(index for index in vocabulary.values() if index not in ending)


def _fingerprint(assets: TokenizerAssets, layout: KvLayout) -> Fingerprint:
    """Name the KV of mock workers of one tokenizer and layout, which may exchange it; never equal to a real model's."""
    shape = json.dumps(dataclasses.asdict(layout), sort_keys=True).encode()
    return Fingerprint(xxhash.xxh3_128_digest(b"mock/1" + shape + assets.tokenizer_json))
