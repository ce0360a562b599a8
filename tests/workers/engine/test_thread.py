"""The engine's thread: what its reports say of the load, and what wakes it."""

from __future__ import annotations

import pytest

from tanghulu.types import RequestId
from tanghulu.workers.compute.models.model import Model
from tanghulu.workers.engine import thread
from tanghulu.workers.engine.thread import StepReport
from tests.workers.rig import BLOCK, PROMPT, Rig
from tests.workers.tiny import request


def test_steps_that_only_decode_share_a_load_and_the_last_has_its_own(tiny_model: Model) -> None:
    """And what was read from peers is in one report alone, though the load that has it might be shared."""
    rig = Rig(tiny_model, None)
    made, reports = request("a", PROMPT, 40), list[StepReport]()
    rig.thread.post(lambda core: core.add(made))
    while not any(report.result.outputs for report in reports):
        reports.append(rig.next_report())
    rig.thread.post(lambda _: rig.thread._speed.read_from_peer(10, 0.1, "there:1"))
    while not any(output.finish for report in reports[-1:] for output in report.result.outputs):
        reports.append(rig.next_report())
    loads = [report.load for report in reports]
    assert [read.num_bytes for load in loads for read in load.shared.reads] == [10]
    assert (loads[-1].shared.num_running, loads[-1].blocks_in_use, loads[-1].shared.prefill_tokens_waiting) == (0, 0, 0)
    assert len({id(load) for load in loads}) < len(loads)
    rig.close()


def test_blocks_come_back_without_a_command_that_wakes(tiny_model: Model) -> None:
    rig = Rig(tiny_model, None)
    held = list[int]()
    rig.thread.post(lambda core: held.extend(core.scheduler.pool.allocate(3) or ()))
    while rig.next_report().load.blocks_in_use != 3:
        pass
    rig.thread.post_lazily(lambda core: core.scheduler.pool.release(held))
    while rig.next_report().load.blocks_in_use:
        pass
    rig.close()


def test_blocks_that_come_back_are_there_before_what_is_asked_for_behind_them(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "MAX_REST_S", 3600.0)
    rig = Rig(tiny_model, None)
    ran = list[str]()
    rig.thread.post_lazily(lambda _: ran.append("came back"))
    rig.thread.post(lambda _: ran.append("asked for"))
    while len(ran) < 2:
        rig.next_report()
    assert ran == ["came back", "asked for"]
    rig.close()


def test_blocks_that_a_request_waits_for_wake_the_engine(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "MAX_REST_S", 3600.0)
    rig = Rig(tiny_model, None, num_blocks=len(PROMPT) // BLOCK + 1)
    rig.run("held", PROMPT, 2, hold_kv=True)
    made = request("waits", [token + 1 for token in PROMPT], 1)
    rig.thread.post(lambda core: core.add(made))
    while rig.next_report().load.shared.num_waiting != 1:
        pass
    rig.thread.post_lazily(lambda core: core.exports.release(RequestId("held")))
    while not rig.next_report().result.outputs:
        pass
    rig.close()
