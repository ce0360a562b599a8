"""Profiles: read from a file, replaced by what workers report, and decided by."""

from __future__ import annotations

from pathlib import Path

import pytest

from tanghulu.conductor.routing.policies.base import RequestView
from tanghulu.conductor.routing.policies.ttft_min import TtftMin
from tanghulu.conductor.routing.profiles import NOTHING_KNOWN, Profiles, read_profiles
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.errors import ConfigError
from tanghulu.session.load import DecodeProfile, PrefillProfile, WorkerLoad
from tanghulu.types import InstanceId, Role

JSON = """{"tiny": {"prefill": {"fixed_s": 0.5, "token_s": 1e-3}, "decode": {"fixed_s": 0.02, "sequence_s": 1e-4}},
 "*": {"prefill": {"token_s": 2e-3}}}"""
TOML = "[tiny.prefill]\nfixed_s = 0.5\ntoken_s = 1e-3\n[tiny.decode]\nfixed_s = 0.02\nsequence_s = 1e-4\n"


@pytest.mark.parametrize(("name", "text"), [("p.json", JSON), ("p.toml", TOML)])
def test_a_file_says_what_models_cost(tmp_path: Path, name: str, text: str):
    (tmp_path / name).write_text(text)
    read = read_profiles(tmp_path / name)
    assert read.of("tiny") == Profiles(PrefillProfile(0.5, 1e-3), DecodeProfile(0.02, 1e-4))
    other = Profiles(PrefillProfile(token_s=2e-3)) if name == "p.json" else NOTHING_KNOWN
    assert read.of("another") == other
    assert read_profiles(None).of("tiny") == NOTHING_KNOWN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the profiles"),
        ('{"tiny": 3}', "tiny is not a table"),
        ('{"tiny": {"prefil": {}}}', r"tiny\.prefil is unknown; known: prefill, decode"),
        ('{"tiny": {"prefill": {"token": 1}}}', r"tiny\.prefill\.token is unknown"),
        ('{"tiny": {"decode": {"fixed_s": -1}}}', r"fixed_s is -1; it must be seconds"),
        ('{"tiny": {"decode": {"fixed_s": true}}}', r"fixed_s is True"),
        ('{"tiny": {"prefill": {"token_s": 0}}}', "every decision would cost nothing"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, message: str):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_profiles(tmp_path / "p.json")


def test_what_a_worker_reports_takes_the_files_place():
    tracker = LoadTracker()
    tracker.known = Profiles(PrefillProfile(token_s=1e-3), DecodeProfile(0.5))
    tracker.report(WorkerLoad(prefill_tokens_waiting=100))
    view = tracker.view(InstanceId("w"), Role.BOTH, 0)
    assert (view.cost, view.decode_profile) == (PrefillProfile(token_s=1e-3), DecodeProfile(0.5))
    assert view.wait_s == pytest.approx(0.1)
    prefill, decode = PrefillProfile(0.01, 2e-3, 1e-9), DecodeProfile(0.03)
    tracker.report(WorkerLoad(prefill_tokens_waiting=100, prefill=prefill, decode=decode))
    view = tracker.view(InstanceId("w"), Role.BOTH, 0)
    assert (view.cost, view.decode_profile) == (prefill, decode)


def test_prompts_that_wait_are_priced_by_their_own_lengths():
    """One of 131,072 tokens waits three times as long as 64 of 2,048, whatever the mean speed was lately."""
    profile = PrefillProfile(0.02, 9.5e-5, 2.1e-9)
    long, short = 131_072, 2048
    waits = {}
    for num, length in ((1, long), (64, short)):
        tracker = LoadTracker()
        tracker.block_tokens = 64
        queue = {"prefill_tokens_waiting": num * length, "prefill_pairs_waiting": num * length**2}
        told = WorkerLoad(num_waiting=num, **queue, prefill=profile, prefill_tokens_per_s=9200.0)
        tracker.report(told)
        waits[num] = tracker.view(InstanceId("w"), Role.BOTH, 0).wait_s
        assert waits[num] == pytest.approx(num * profile.seconds(length, 0))
        tracker.sent("own", short, long // 64)  # all but its end is cached
        rest_s = profile.seconds(long, long - short)
        assert tracker.view(InstanceId("w"), Role.BOTH, 0).wait_s == pytest.approx(waits[num] + rest_s)
        tracker.check()
    assert waits[1] > 2 * waits[64]


def test_a_worker_that_tells_only_tokens_is_priced_by_its_mean_speed():
    tracker = LoadTracker()
    tracker.report(WorkerLoad(prefill_tokens_waiting=1000, prefill_tokens_per_s=500.0, prefill=PrefillProfile(1, 1, 1)))
    assert tracker.view(InstanceId("w"), Role.BOTH, 0).wait_s == 2.0


def test_the_default_policy_decides_by_the_profiles():
    """Equal speeds on the mean, but one is slow at long prompts: attention costs it more."""
    trackers = {name: LoadTracker() for name in ("steep", "flat")}
    trackers["steep"].report(WorkerLoad(blocks_free=9999, prefill=PrefillProfile(0.0, 1e-5, 1e-8)))
    trackers["flat"].report(WorkerLoad(blocks_free=9999, prefill=PrefillProfile(0.0, 1e-4, 0.0)))
    shown = [tracker.view(InstanceId(name), Role.BOTH, 0) for name, tracker in trackers.items()]
    chosen = {n: TtftMin().choose(RequestView(n, 64, 1 << 20), shown).prefill for n in (640, 64_000)}
    assert chosen == {640: "steep", 64_000: "flat"}
