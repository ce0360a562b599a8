"""Texts that keep to a grammar, whatever the model would rather say."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tanghulu.errors import InvalidRequest
from tanghulu.hashing import TokenSequence
from tanghulu.session.messages import Submit
from tanghulu.session.outputs import FinishReason
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import Fingerprint, RequestId
from tanghulu.workers.compute.device_sampling import sample_on_device
from tanghulu.workers.compute.sampling import SamplingRow, sample
from tanghulu.workers.engine.grammar import MAX_GRAMMAR_CHARS, MAX_KNOWN, Grammar, GrammarCompiler, GrammarKind
from tanghulu.workers.sessions.wire import RequestFactory
from tests.workers.tiny import request

pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'tanghulu[worker]'")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 1, "maximum": 99}, "tag": {"enum": ["ab", "cd"]}},
        "required": ["age", "tag"],
        "additionalProperties": False,
    }
)
PROMPT = [7, 8, 9]


def _byte_level() -> tuple[Tokenizer, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer, len(alphabet)


TOKENIZER, END = _byte_level()
VOCAB = END + 1 + 14  # a model's vocabulary is often padded


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_str().encode(), VOCAB, [END])


def _generate(grammar: Grammar, seed: int, params: Sampling, at_most: int = 400, banned: Sequence[int] = ()):
    """Tokens under ``grammar`` of a model whose logits are noise, the end token included."""
    generator = torch.Generator().manual_seed(seed)
    tokens = list(PROMPT)
    while len(tokens) < at_most and tokens[-1] != END:
        row = SamplingRow(params, np.array(tokens, np.uint32), len(PROMPT), frozenset(banned), grammar)
        logits = torch.randn(1, VOCAB, generator=generator)
        tokens += sample(logits, [row]).tokens
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_noise_becomes_json_of_the_schema(compiler, temperature):
    for seed in range(8):
        tokens = _generate(compiler.compile(GrammarKind.JSON_SCHEMA, SCHEMA), seed, Sampling(temperature=temperature))
        assert tokens[-1] == END
        found = json.loads(TOKENIZER.decode(tokens[:-1]))
        assert 1 <= found["age"] <= 99
        assert found["tag"] in ("ab", "cd")
        assert found.keys() == {"age", "tag"}


def test_noise_becomes_what_the_expression_says(compiler):
    for seed in range(8):
        tokens = _generate(compiler.compile(GrammarKind.REGEX, "[a-c]{3,5}-(x|yy)"), seed, Sampling(temperature=1))
        assert tokens[-1] == END
        assert re.fullmatch("[a-c]{3,5}-(x|yy)", TOKENIZER.decode(tokens[:-1]))


def test_a_state_catches_up_with_what_was_generated_elsewhere(compiler):
    tokens = _generate(compiler.compile(GrammarKind.JSON_SCHEMA, SCHEMA), 3, Sampling(temperature=1))
    step_by_step, at_once = (compiler.compile(GrammarKind.JSON_SCHEMA, SCHEMA) for _ in range(2))
    so_far = np.array(tokens, np.uint32)
    for count in range(len(tokens) - 1):
        masks = [step_by_step.allowed(so_far[:count])]
    masks.append(at_once.allowed(so_far[: len(tokens) - 2]))
    assert np.array_equal(*masks)


def test_min_tokens_do_not_stop_a_complete_text_from_ending(compiler):
    """The end is banned for min_tokens, but nothing else may follow."""
    tokens = _generate(compiler.compile(GrammarKind.REGEX, "ab"), 1, Sampling(temperature=0), banned=[END])
    assert TOKENIZER.decode(tokens[:-1]) == "ab"
    longer = _generate(compiler.compile(GrammarKind.REGEX, "a{2,9}"), 1, Sampling(temperature=0), banned=[END])
    assert TOKENIZER.decode(longer[:-1]) == "a" * 9


@pytest.mark.parametrize("stop", [StopRule(40, min_tokens=6), StopRule(40, ignore_eos=True)])
def test_a_text_ends_where_its_grammar_does(compiler, stop):
    """Whatever min_tokens and ignore_eos say: what came behind would be bound by nothing."""
    made = request("a", PROMPT, sampling=Sampling(temperature=0), stop=stop, eos_ids=frozenset({END}))
    made.grammar = compiler.compile(GrammarKind.REGEX, "ab")
    generator = torch.Generator().manual_seed(1)
    while (reason := made.finish_reason(100)) is None or made.num_generated == 0:
        logits = torch.randn(1, VOCAB, generator=generator)
        made.sequence.append(sample(logits, [SamplingRow.of(made)]).tokens)
    assert reason is FinishReason.STOP
    assert TOKENIZER.decode(made.sequence.tokens[len(PROMPT) : -1].tolist()) == "ab"


def test_a_text_that_left_its_grammar_keeps_its_bans(compiler):
    grammar = compiler.compile(GrammarKind.REGEX, "ab")
    elsewhere = np.array([*PROMPT, *TOKENIZER.encode("x").ids], np.uint32)
    logits = torch.zeros(1, VOCAB)
    logits[0, END] = 9.0
    row = SamplingRow(Sampling(temperature=0), elsewhere, len(PROMPT), frozenset({END}), grammar)
    assert sample(logits, [row]).tokens != [END]
    assert sample_on_device(logits, [row]).tokens != [END]


def test_other_rows_of_the_batch_are_free(compiler):
    grammar = compiler.compile(GrammarKind.REGEX, "zz")
    params, tokens = Sampling(temperature=0), np.array(PROMPT, np.uint32)
    rows = [SamplingRow(params, tokens, 3, frozenset(), each) for each in (None, grammar, None)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    kept = logits.clone()
    best = logits.argmax(dim=1).tolist()
    assert sample(logits, rows).tokens == [best[0], TOKENIZER.encode("z").ids[0], best[2]]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, "[a"),
        (GrammarKind.JSON_SCHEMA, '{"type": "wrong"}'),
        (GrammarKind.JSON_SCHEMA, "{"),
        (GrammarKind.LARK, "start: ("),
        (GrammarKind.REGEX, "a" * (MAX_GRAMMAR_CHARS + 1)),
    ],
)
def test_what_is_no_grammar_is_refused_with_a_reason(compiler, kind, text):
    with pytest.raises(InvalidRequest, match=kind.value):
        compiler.compile(kind, text)


CIRCULAR = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
LATER = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/a"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}},
}


@pytest.mark.parametrize("schema", [{"$ref": "#"}, CIRCULAR])
def test_a_schema_that_no_text_matches_is_refused(compiler, schema):
    with pytest.raises(InvalidRequest, match="themselves") as refused:
        compiler.compile(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("text", ["stuck", "left"])
def test_a_text_under_a_grammar_that_failed_has_not_stopped(compiler, text):
    """Neither where nothing can follow any more, nor where it was made under another grammar."""
    made = request("a", PROMPT, sampling=Sampling(temperature=0), stop=StopRule(40), eos_ids=frozenset({END}))
    if text == "stuck":
        made.grammar = compiler.compile(GrammarKind.JSON_SCHEMA, json.dumps(LATER))
    else:
        made.grammar = compiler.compile(GrammarKind.REGEX, "ab")
        made.sequence.append(TOKENIZER.encode("x").ids)
    logits = torch.zeros(1, VOCAB)
    logits[0, END] = 9.0
    while (reason := made.finish_reason(100)) is None or made.num_generated == 0:
        made.sequence.append(sample(logits, [SamplingRow.of(made)]).tokens)
    assert reason is FinishReason.ERROR


def test_a_text_is_free_up_to_a_marker_and_bound_behind_it(compiler):
    text = 'start: before "b" TEXT\nbefore[suffix="a"]: /(.|\\n)*/\nTEXT: /(.|\\n)*/\n'
    tokens = _generate(compiler.compile(GrammarKind.LARK, text), 3, Sampling(temperature=1))
    assert "ab" in TOKENIZER.decode(tokens[len(PROMPT) :])


def test_a_chain_of_a_thousand_rules_does_not_kill_the_process(compiler):
    rules = {str(n): {"items": {"$ref": f"#/$defs/{n + 1}"}} for n in range(1600)} | {"1600": {"type": "integer"}}
    text = json.dumps({"$ref": "#/$defs/0", "$defs": rules}, separators=(",", ":"))
    assert len(text) <= MAX_GRAMMAR_CHARS
    grammar = compiler.compile(GrammarKind.JSON_SCHEMA, text)
    assert grammar.allowed(np.array([], np.uint32)).any()


def test_many_grammars_are_not_kept(compiler):
    for number in range(MAX_KNOWN + 3):
        compiler.compile(GrammarKind.REGEX, f"a{number}")
    assert len(compiler._known) == MAX_KNOWN


def test_a_submission_brings_its_grammar(compiler):
    tokens = np.array(PROMPT, "<u4").tobytes()
    submit = Submit(RequestId("r"), tokens, len(PROMPT), Sampling(regex="ab"), StopRule(4))
    factory = RequestFactory(Fingerprint(b"f" * 16), 8, "xxh3_128", [END], compiler)
    compiling = factory.compiling(submit)
    assert compiling is not None
    compiling.result()
    assert factory.compiling(submit) is None, "it is known now"
    made = factory.request(submit)
    assert made.grammar is not None
    assert isinstance(made.sequence, TokenSequence)
    with pytest.raises(InvalidRequest, match="grammar"):
        RequestFactory(Fingerprint(b"f" * 16), 8, "xxh3_128", [END]).request(submit)
