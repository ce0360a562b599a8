"""A client's traceparent is gone on with where W3C's specification allows it; else there is a new trace."""

from __future__ import annotations

import re

import pytest

from tanghulu.conductor.stories.origin import Origin, trace_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_good_one_is_gone_on_with():
    trace = trace_of([GOOD])
    assert (trace.trace_id, trace.parent_id, trace.is_sampled) == (TRACE, SPAN, True)
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", trace.header)
    assert trace.span_id != SPAN
    assert not trace_of([f"00-{TRACE}-{SPAN}-00"]).is_sampled


def test_a_later_version_is_read_as_far_as_it_is_known():
    assert trace_of([f"cc-{TRACE}-{SPAN}-03-what-the-future-brings"]).header.startswith(f"00-{TRACE}-")
    assert trace_of([f"cc-{TRACE}-{SPAN}-03"]).flags == 1


@pytest.mark.parametrize(
    "given",
    [
        [],
        [GOOD, GOOD],
        [""],
        [GOOD.upper()],
        [GOOD + "-more"],
        [f"ff-{TRACE}-{SPAN}-01"],
        [f"00-{'0' * 32}-{SPAN}-01"],
        [f"00-{TRACE}-{'0' * 16}-01"],
        [f"00-{TRACE[:-1]}-{SPAN}-01"],
        [f"00-{TRACE}-{SPAN}-1"],
        [f"00-{TRACE}-{SPAN}"],
        [f"cc-{TRACE}-{SPAN}-01.more"],
        [f"00-{TRACE[:-1]}g-{SPAN}-01"],
    ],
)
def test_a_bad_one_is_none(given):
    trace = trace_of(given)
    assert trace.trace_id not in (TRACE, "0" * 32)
    assert trace.parent_id == ""
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace.header)


def test_sequences_of_one_request_share_its_trace_and_have_a_span_each():
    origin = Origin("mine", trace_of([GOOD]), 0.0, 0.0)
    beside = origin.beside().trace
    assert (beside.trace_id, beside.parent_id) == (TRACE, SPAN)
    assert beside.span_id != origin.trace.span_id
