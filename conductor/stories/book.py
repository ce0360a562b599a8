"""The stories of requests in progress, and of the last that ended; listeners receive each when it closes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from prometheus_client import Histogram

from tanghulu.conductor.stories.origin import Origin
from tanghulu.conductor.stories.story import Phase, RequestStatus, Story

#: Closed stories that are kept.
MAX_KEPT: Final = 1000


class StoryBook:
    """Open and recent stories. ``seconds`` has the labels model, phase and status. ``listeners`` get closed ones."""

    def __init__(self, seconds: Histogram, max_kept: int = MAX_KEPT) -> None:
        self.listeners: list[Callable[[Story], None]] = []
        self._seconds = seconds
        self._labelled: dict[tuple[str, Phase, RequestStatus], Histogram] = {}
        self._under_way: dict[str, Story] = {}
        self._kept: deque[Story] = deque(maxlen=max_kept)

    def begin(
        self, story_id: str, name: str, model: str, prompt_tokens: int, now_s: float, origin: Origin | None
    ) -> Story:
        """Begin a new story, in progress until it is `over`."""
        story = self._under_way[story_id] = Story(story_id, name, model, prompt_tokens, now_s, origin)
        return story

    def over(self, story: Story, now_s: float) -> None:
        """Close a story that has ended, and keep it among the recent ones. Repeated calls do no harm."""
        if self._under_way.pop(story.id, None) is None:
            return
        story.over(now_s)
        self._kept.append(story)
        assert story.status is not None
        for phase, seconds in story.phases().items():
            key = story.model, phase, story.status
            child = self._labelled.get(key)
            if child is None:
                child = self._seconds.labels(story.model, phase.name.lower(), story.status.name.lower())
                self._labelled[key] = child
            child.observe(seconds)
        for listener in self.listeners:
            listener(story)

    def stories(self) -> list[Story]:
        """Return the stories in progress, oldest first, followed by the closed ones, latest first."""
        return [*self._under_way.values(), *reversed(self._kept)]

    def find(self, name: str) -> list[Story]:
        """Return the stories known as ``name``: the id of a sequence or an answer, the client's own, or a trace's."""
        return [story for story in self.stories() if name in _names(story)]

    def check(self) -> None:
        assert len(self._kept) <= (self._kept.maxlen or 0)
        assert all(story_id == story.id and not story.is_over for story_id, story in self._under_way.items())
        assert all(story.is_over for story in self._kept)
        for story in self.stories():
            story.check()


def _names(story: Story) -> tuple[str, ...]:
    origin = story.origin
    return (story.id, story.name, *((origin.x_request_id, origin.trace.trace_id) if origin is not None else ()))
