"""Log probabilities of prompts: those of transformers, however the prompt is cut, cached, fetched or moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tanghulu.errors import InvalidRequest
from tanghulu.session.sampling import PromptScoring, Sampling, StopRule
from tanghulu.workers.compute import prompt_scoring
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.engine.engine import EngineCore
from tanghulu.workers.engine.step import PromptScoreArrays
from tests.workers.tiny import BLOCK, VOCAB, engine, request, write_tiny

PROMPT = [2 + (i * 7) % (VOCAB - 2) for i in range(5 * BLOCK + 3)]
ASKED = (3, 90, 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, torch.Tensor]:
    """The model, and transformers' log probabilities of every position of the prompt."""
    made = write_tiny(Path(tmp_path_factory.mktemp("tiny")))
    with torch.inference_mode():
        logits = made.reference()(torch.tensor([PROMPT])).logits[0]
    return made.load(), torch.log_softmax(logits, dim=-1)


def _scores(core: EngineCore, name: str, start: int = 1, num_top: int = 3, **more: object) -> list[PromptScoreArrays]:
    sampling = Sampling(temperature=0, num_logprobs=num_top, logprob_token_ids=ASKED)
    core.add(request(name, PROMPT, 2, sampling=sampling, scoring=PromptScoring(start, num_top), **more))  # type: ignore[arg-type]
    found: list[PromptScoreArrays] = []
    while core.scheduler.has_work:
        found += core.step().scores
    return found


def _check(parts: list[PromptScoreArrays], expected: torch.Tensor, start: int) -> None:
    """``parts`` are those of all positions from ``start`` on, once each, in order."""
    assert [part.position for part in parts] == [start, *(part.end for part in parts[:-1])]
    assert parts[-1].end == len(PROMPT)
    rows = expected[start - 1 : -1]
    own = torch.stack([row[token] for row, token in zip(rows, PROMPT[start:], strict=True)])
    for part, name in ((own, "logprobs"), (rows.topk(3).values, "top_logprobs"), (rows[:, ASKED], "named_logprobs")):
        got = np.concatenate([getattr(each, name) for each in parts])
        assert np.abs(got - part.numpy()).max() < 1e-4, name
    assert np.concatenate([p.top_ids for p in parts]).tolist() == rows.topk(3).indices.tolist()
    ranks = [int((row > row[token]).sum()) + 1 for row, token in zip(rows, PROMPT[start:], strict=True)]
    assert np.concatenate([p.ranks for p in parts]).tolist() == ranks


@pytest.mark.parametrize("budget", [8, 9, 64])
@pytest.mark.parametrize("start", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK + 5, len(PROMPT) - 1])
def test_they_are_those_of_transformers(
    tiny: tuple[Model, torch.Tensor], budget: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = tiny
    monkeypatch.setattr(prompt_scoring, "MAX_LOGITS", 5 * VOCAB)  # five rows of logits at a time
    core = engine(model, max_num_batched_tokens=budget)
    _check(_scores(core, "cold", start), expected, start)
    _check(_scores(core, "cached", start), expected, start)
    core.check()


def test_only_what_is_wanted_is_computed_again(tiny: tuple[Model, torch.Tensor]) -> None:
    model, _ = tiny
    core = engine(model)
    _scores(core, "cold")
    core.add(request("again", PROMPT, 1, scoring=PromptScoring(2 * BLOCK + 5)))
    result = core.step()
    assert result.outputs[0].cached_tokens == 2 * BLOCK
    core.add(request("none", PROMPT, 1))
    assert core.step().outputs[0].cached_tokens == 5 * BLOCK


def test_rows_of_logits_are_few_at_a_time(tiny: tuple[Model, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = tiny
    most: list[int] = []
    fill = prompt_scoring._fill
    monkeypatch.setattr(prompt_scoring, "MAX_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(prompt_scoring, "_fill", lambda part, logits: (most.append(len(logits)), fill(part, logits)))
    _scores(engine(model), "a")
    assert max(most) == 7
    assert sum(most) == len(PROMPT) - 1


def test_what_was_scored_before_a_preemption_is_not_scored_again(tiny: tuple[Model, torch.Tensor]) -> None:
    """Two prompts that do not fit side by side once both grow: the younger is preempted, and goes on where it was."""
    model, expected = tiny
    core = engine(model, num_blocks=11, max_num_batched_tokens=16)
    core.add(request("old", [3] * (3 * BLOCK), 3 * BLOCK))
    parts, preempted = [], 0
    sampling = Sampling(temperature=0, num_logprobs=3, logprob_token_ids=ASKED)
    core.add(request("young", PROMPT, 20, sampling=sampling, scoring=PromptScoring(1, 3)))
    while core.scheduler.has_work:
        result = core.step()
        parts += result.scores
        preempted += "young" in result.preempted
    assert preempted
    _check(parts, expected, 1)


def test_a_request_that_goes_on_elsewhere_owes_only_the_rest(tiny: tuple[Model, torch.Tensor]) -> None:
    """With tokens that were generated before: the prompt's end is where it was."""
    model, expected = tiny
    core = engine(model)
    stop = StopRule(5, ignore_eos=True)
    made = request("moved", [*PROMPT, 7, 8], num_prompt=len(PROMPT), stop=stop, scoring=PromptScoring(30))
    core.add(made)
    parts = list(core.step().scores)
    assert (parts[0].position, parts[-1].end) == (30, len(PROMPT))
    own = [float(expected[p - 1][PROMPT[p]]) for p in range(30, len(PROMPT))]
    assert np.abs(np.concatenate([p.logprobs for p in parts]) - own).max() < 1e-4


def test_ids_of_the_generated_tokens_too(tiny: tuple[Model, torch.Tensor]) -> None:
    model, expected = tiny
    core = engine(model)
    core.add(request("a", PROMPT, 1, sampling=Sampling(temperature=0, num_logprobs=0, logprob_token_ids=ASKED)))
    (logprobs,) = core.step().outputs[0].logprobs
    assert logprobs.token_ids[1:] == ASKED
    assert np.abs(np.array(logprobs.logprobs[1:]) - expected[-1][list(ASKED)].numpy()).max() < 1e-4


def test_what_cannot_be_had_is_refused(tiny: tuple[Model, torch.Tensor]) -> None:
    with pytest.raises(InvalidRequest, match="first token"):
        PromptScoring(0).validate()
    with pytest.raises(InvalidRequest, match="between 0 and 20"):
        PromptScoring(1, 21).validate()
    with pytest.raises(InvalidRequest, match="at most 128"):
        Sampling(logprob_token_ids=tuple(range(129))).validate()
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine(tiny[0]).add(request("a", PROMPT, sampling=Sampling(logprob_token_ids=(VOCAB,))))
