"""The book of stories: those under way, a bounded number of the last, and a histogram by phase and status."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tanghulu.conductor.metrics import ConductorMetrics
from tanghulu.conductor.stories.book import StoryBook
from tanghulu.conductor.stories.origin import Origin, Trace
from tanghulu.conductor.stories.story import RequestStatus, Story


def test_it_keeps_the_last_ones():
    registry, heard = CollectorRegistry(), []
    book = StoryBook(ConductorMetrics(registry).phases, max_kept=3)
    book.listeners.append(heard.append)
    for number in range(6):
        story = book.begin(str(number), f"name-{number}", "m", 1, float(number), None)
        if number != 4:
            story.ended(RequestStatus.REFUSED, number + 1.0)
            book.over(story, number + 2.0)
            book.over(story, number + 9.0)  # once is enough
        book.check()
    assert [story.id for story in book.stories()] == ["4", "5", "3", "2"]
    assert [story.id for story in heard] == ["0", "1", "2", "3", "5"]
    labels = {"model": "m", "phase": "queue", "status": "refused"}
    assert registry.get_sample_value("tanghulu_request_phase_seconds_count", labels) == 5
    assert registry.get_sample_value("tanghulu_request_phase_seconds_sum", labels) == 5


def test_a_story_is_found_by_each_of_its_names():
    book = StoryBook(ConductorMetrics(CollectorRegistry()).phases)
    origin = Origin("mine", Trace("1" * 32, "2" * 16), 0.0, 0.0)
    story = book.begin("id", "cmpl-1", "m", 1, 0.0, origin)
    other: Story = book.begin("other", "cmpl-2", "m", 1, 0.0, None)
    for name in ("id", "cmpl-1", "mine", "1" * 32):
        assert book.find(name) == [story]
    assert book.find("other") == [other]
    assert book.find("") == []
