"""The model of a simulated cluster: each token is a function of all tokens before it, so one that is lost, doubled or
computed from a wrong beginning changes the rest of the text."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from random import Random

import numpy as np
import xxhash
from msgspec import structs
from tokenizers import Tokenizer

from tanghulu.conductor.inference.generation import TextRules
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.hashing import Tokens
from tanghulu.session.outputs import FinishReason
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import RequestId
from tanghulu.workers.config import WorkerConfig
from tanghulu.workers.engine.kv_layout import KvLayout
from tanghulu.workers.engine.requests import EngineRequest
from tanghulu.workers.mock.loading import load
from tanghulu.workers.mock.runner import MockRunner, MockTiming

BLOCK_TOKENS = 8
MAX_NEW = 40
TIMING = MockTiming(step_s=0.01, token_s=2e-4, pair_s=0.0, sequence_s=5e-4, context_s=0.0)
_LOADED = load(WorkerConfig(engine="mock", model="mock", block_tokens=BLOCK_TOKENS), lambda _: None)
LAYOUT: KvLayout = _LOADED.layout
ASSETS, FINGERPRINT, NAME = _LOADED.assets, _LOADED.fingerprint, _LOADED.name
_TOKENIZER = Tokenizer.from_buffer(ASSETS.tokenizer_json)
VOCAB = _TOKENIZER.get_vocab_size()
LETTERS = [_TOKENIZER.token_to_id(chr(code)) for code in range(ord("a"), ord("z") + 1)]
END = ASSETS.eos_ids[0]
_END_EVERY = 60


def next_token(tokens: np.ndarray, seed: int, num_generated: int, stop: StopRule) -> int:
    """The token behind ``tokens``."""
    drawn = xxhash.xxh3_64_intdigest(tokens.astype("<u4").tobytes(), seed=seed)
    ends = not stop.ignore_eos and num_generated >= stop.min_tokens and (drawn >> 32) % _END_EVERY == 0
    return END if ends else LETTERS[drawn % len(LETTERS)]


class TextRunner(MockRunner):
    """A mock that draws `next_token`, and says so before it computes a step."""

    def _token(self, request: EngineRequest) -> int:
        sampling, asked = request.sampling, request.stop
        stop = StopRule(asked.max_new_tokens, (), asked.ignore_eos, asked.min_tokens)
        seed = 0 if sampling.temperature == 0 else sampling.seed
        return next_token(request.sequence.tokens, seed, request.num_generated, stop)


@dataclass(frozen=True)
class Answer:
    """What a request must give its client. ``tokens`` with the one that ends it; ``text`` as it is shown."""

    tokens: list[int]
    text: str
    finish: FinishReason


@dataclass(frozen=True)
class Asked:
    """A request and its answer."""

    request: GenerationRequest
    rules: TextRules

    def named(self, name: str) -> Asked:
        """The same under another name."""
        return Asked(structs.replace(self.request, id=RequestId(name)), self.rules)

    @functools.cached_property
    def answer(self) -> Answer:
        """Computed here, by nothing of the product."""
        stop, tokens, text = self.request.stop, list(self.request.prompt), ""
        num_prompt, seed = len(tokens), _seed(self.request.sampling)
        while True:
            token = next_token(np.array(tokens), seed, len(tokens) - num_prompt, stop)
            tokens.append(token)
            made = tokens[num_prompt:]
            if token == END:
                return Answer(made, text, FinishReason.STOP)
            text += chr(ord("a") + LETTERS.index(token))
            found = [at for each in self.rules.stop_strings if (at := text.find(each)) >= 0]
            if found:
                return Answer(made, text[: min(found)], FinishReason.STOP)
            if len(made) >= stop.max_new_tokens:
                return Answer(made, text, FinishReason.LENGTH)


def _seed(sampling: Sampling) -> int:
    return 0 if sampling.temperature == 0 else sampling.seed or 0


def prefixes(rng: Random) -> list[list[int]]:
    """Beginnings that prompts share."""
    return [_letters(rng, length) for length in (0, 0, 24, 100)]


def ask(rng: Random, number: int, shared: list[list[int]], client: str) -> Asked:
    """A drawn request."""
    prompt = rng.choice(shared) + _letters(rng, rng.choice((1, 8, 40, 130)))
    sampling = Sampling(temperature=0.0) if rng.random() < 0.5 else Sampling(seed=rng.getrandbits(31))
    stop = StopRule(rng.choice((1, 2, 12, MAX_NEW)), ignore_eos=rng.random() < 0.3, min_tokens=rng.choice((0, 0, 5)))
    pair = chr(rng.randrange(97, 123))
    rules = TextRules(stop_strings=(pair,)) if rng.random() < 0.1 and not stop.min_tokens else TextRules()
    tokens: Tokens = np.array(prompt, dtype=np.uint32)
    request = GenerationRequest(RequestId(f"r{number}"), NAME, tokens, sampling, stop, client=client)
    return Asked(structs.replace(request, priority=rng.choice((0, 0, 0, 1))), rules)


def tokens_of(characters: str) -> list[int]:
    return _TOKENIZER.encode(characters).ids


def _letters(rng: Random, count: int) -> list[int]:
    return [rng.choice(LETTERS) for _ in range(count)]
