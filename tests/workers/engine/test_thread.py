"""The engine's thread: what its reports say of the load."""

from __future__ import annotations

from tanghulu.workers.compute.models.registry import Model
from tanghulu.workers.engine.thread import StepReport
from tests.workers.rig import PROMPT, Rig
from tests.workers.tiny import request


def test_steps_that_only_decode_share_a_load_and_the_last_has_its_own(tiny_model: Model) -> None:
    """And what was read from peers is in one report alone, though the load that has it might be shared."""
    rig = Rig(tiny_model, None)
    made, reports = request("a", PROMPT, 40), list[StepReport]()
    rig.thread.post(lambda core: core.add(made))
    while not any(report.result.outputs for report in reports):
        reports.append(rig.next_report())
    rig.thread.post(lambda _: rig.thread._speed.read_from_peer(10, 0.1, "there:1"))
    while not any(output.finish_reason for report in reports[-1:] for output in report.result.outputs):
        reports.append(rig.next_report())
    loads = [report.load for report in reports]
    assert [read.num_bytes for load in loads for read in load.reads] == [10]
    assert (loads[-1].num_running, loads[-1].blocks_in_use, loads[-1].pending_tokens) == (0, 0, 0)
    assert len({id(load) for load in loads}) < len(loads)
    rig.close()
