"""Causes of cache misses, injected one by one into a simulated cluster, and compared with what the conductor explains.

Each scenario knows why each block of its last prompt is computed, if it is, as it has arranged that itself: another
prompt before, a cache filled with others, a worker killed, the store away. `Injections` runs all scenarios of a seed,
in drawn order, with drawn lengths and places, and counts blocks by scenario and verdict.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

import numpy as np

from tanghulu.conductor.explain.place import message_starts
from tanghulu.conductor.inference.generation import GenerationCall, TextRules
from tanghulu.conductor.routing.overrides import RoutingOverrides
from tanghulu.conductor.routing.requests import GenerationRequest
from tanghulu.conductor.stories.account import Audience, Cause, Explanation, Run, Source
from tanghulu.hashing import TokenSequence, root_hash
from tanghulu.session.sampling import Sampling, StopRule
from tanghulu.types import BlockHash, Fingerprint, RequestId, Role
from tests.cluster_sim import store, text
from tests.cluster_sim.plan import Plan
from tests.cluster_sim.worker import SimWorker
from tests.cluster_sim.world import World

SIZE: Final = text.BLOCK_TOKENS
OTHER: Final = "another", Fingerprint(b"another model's!")
#: Blocks of a worker's cache, and of a prompt that pushes most others out.
NUM_BLOCKS, FILLING = 64, 60
#: Until events have come to the conductor, and blocks to the store.
_SETTLED_S = 0.5
#: Until a store that did not answer is called again, and a killed worker's successor is known.
_RECOVERED_S = 40.0

_HURTING: Final = frozenset(
    [
        "holder_gone",
        "copies_gone",
        "aborted_and_gone",
        "moved",
        "moved_from_holder",
        "peer_away",
        "store_away",
        "store_late",
        "store_late_midway",
        "aborted_store_away",
    ]
)

#: The right cause of a prompt's block of this number.
Truth = Callable[[int], Cause]


class Injections(World):
    """One seed. ``blocks`` counts computed blocks by (scenario, verdict); ``errors`` names wrong ones.

    Verdicts are "right", "wrong" and "uncertain": wrong, and said to be uncertain; "certain" is counted besides.
    Workers 0 and 1 serve one model, 2 another.
    """

    def __init__(self, seed: int) -> None:
        has_store = bool(seed % 2)
        plan = Plan((Role.BOTH,) * 3, faults=(), num_blocks=NUM_BLOCKS, has_store=has_store, checks=False)
        super().__init__(seed, plan)
        self.draw = Random(seed)
        self.blocks: Counter[tuple[str, str]] = Counter()
        self.errors: list[str] = []
        self._scenario = ""

    def scenarios(self) -> list[Callable[[], Any]]:
        both: list[Callable[[], Any]] = [
            self.new,
            self.barely_alike,
            self.diverged,
            self.date,
            self.continued,
            self.aborted,
            self.other_salt,
            self.other_model,
            self.computed_elsewhere,
            self.evicted_and_diverged,
            self.moved,
        ]
        if self.plan.has_store:
            stored = [self.evicted_from_store, self.store_away, self.store_late, self.store_late_midway]
            return [*both, *stored, self.aborted_store_away]
        gone = [
            self.evicted,
            self.dropped,
            self.holder_gone,
            self.moved_from_holder,
            self.copies_gone,
            self.aborted_and_gone,
        ]
        return [*both, *gone, self.held_elsewhere, self.peer_away]

    # --- scenarios

    async def new(self) -> None:
        await self.judge(self.prompt(), lambda block: Cause.NEW)

    async def barely_alike(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt)
        await self.judge(self.leaving(prompt, self.draw.randrange(1, SIZE)), lambda block: Cause.NEW)

    async def diverged(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt)
        shared = self.draw.randrange(SIZE, len(prompt))
        explained = await self.judge(self.leaving(prompt, shared), lambda block: Cause.DIVERGED)
        for run in explained.runs:
            if run.why is Cause.DIVERGED:
                assert (run.detail["block"], run.detail["token"]) == (shared // SIZE, shared), run

    async def date(self) -> None:
        """A time of day in the first message."""
        rules = "".join(map(chr, self.draw.choices(range(97, 123), k=90)))
        contents = [f"Now: 2026-11-28 10:41:{second}. {rules}" for second in self.draw.sample(range(10, 60), 2)]
        earlier, rendered = (f"<system> {content} </system> {self.draw.random()}" for content in contents)
        await self.ask(text.tokens_of(earlier))
        starts = message_starts(rendered, contents[1:])
        explained = await self.judge(text.tokens_of(rendered), lambda block: Cause.DIVERGED, messages=starts)
        for run in explained.runs:
            if run.why is Cause.DIVERGED:
                assert (run.detail["message"], run.detail["kind"]) == (0, "date"), run

    async def continued(self) -> None:
        """By its answer, of which the last token is not computed: a block that ends with it is known, and not kept."""
        prompt = self.prompt()
        answered = [*prompt, *await self.ask(prompt)]
        known = len(answered) // SIZE
        await self.judge([*answered, *self.prompt()], lambda block: Cause.NOT_KEPT if block < known else Cause.NEW)

    async def aborted(self) -> None:
        prompt = self.prompt(20)
        await self.ask(prompt, abort_s=self.draw.uniform(0, 0.03))
        await self.judge(prompt, lambda block: Cause.NOT_KEPT)

    async def other_salt(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt, salt=b"one")
        await self._judge_other(prompt, salt=b"two")

    async def other_model(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt, 2)
        await self._judge_other(prompt)

    async def _judge_other(self, prompt: list[int], **fields: Any) -> None:
        shared = self.draw.randrange(SIZE, len(prompt))
        alike = shared // SIZE
        await self.judge(
            self.leaving(prompt, shared), lambda block: Cause.OTHER_NAME if block < alike else Cause.NEW, **fields
        )

    async def computed_elsewhere(self) -> None:
        prompt = self.prompt(20)
        first = asyncio.ensure_future(self.ask(prompt, 0))
        await asyncio.sleep(self.draw.uniform(0, 0.01))
        await self.judge(prompt, lambda block: Cause.NOT_WORTH_FETCHING, 1)
        await first

    async def evicted_and_diverged(self) -> None:
        prompt = await self.pushed_out()
        shared = self.draw.randrange(SIZE, len(prompt))
        alike = shared // SIZE
        await self.judge(self.leaving(prompt, shared), lambda block: Cause.EVICTED if block < alike else Cause.DIVERGED)

    async def moved(self) -> None:
        """Its worker dies while it computes the prompt, which is new all the same."""
        await self._judge_moved(self.prompt(20), Cause.NEW)

    async def _judge_moved(self, prompt: list[int], right: Cause) -> None:
        kill_s = self.draw.uniform(0, 0.02)
        self.loop.call_later(kill_s, lambda: self._kill(self.workers[0], silently=False))
        await self.judge(prompt, lambda block: right)

    async def evicted(self) -> None:
        prompt = await self.pushed_out()
        await self.judge(prompt, lambda block: Cause.EVICTED)

    async def dropped(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt)
        await self.workers[0]._drop_cached()
        await self.judge(prompt, lambda block: Cause.EVICTED)

    async def holder_gone(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt)
        self._kill(self.workers[0], silently=False)
        await asyncio.sleep(_SETTLED_S)
        await self.judge(prompt, lambda block: Cause.EVICTED, 1)

    async def moved_from_holder(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt)
        await self._judge_moved(prompt, Cause.EVICTED)

    async def aborted_and_gone(self) -> None:
        """The first time before anything was computed; the second time its worker dies with what it has computed."""
        prompt = self.prompt()
        await self.ask(prompt, abort_s=0.0)
        for right in (Cause.NOT_KEPT, Cause.EVICTED):
            self._kill(self.workers[0], silently=False)
            await asyncio.sleep(_RECOVERED_S)
            await self.judge(prompt, lambda block, right=right: right)

    async def copies_gone(self) -> None:
        """One was evicted, and the worker of the other killed."""
        prompt = await self.pushed_out(lambda prompt: self.ask(prompt, 1))
        self._kill(self.workers[1], silently=False)
        await asyncio.sleep(_SETTLED_S)
        await self.judge(prompt, lambda block: Cause.EVICTED)

    async def held_elsewhere(self) -> None:
        """Reading it over a link of a byte a second takes longer than computing it."""
        self.workers[1].connector._speed.read_from_peer(100, 100.0)
        prompt = self.prompt()
        await self.ask(prompt, 1)  # whose report has the speed
        await self.ask(prompt := self.prompt(), 0)
        await self.judge(prompt, lambda block: Cause.NOT_WORTH_FETCHING, 1)

    async def peer_away(self) -> None:
        prompt = self.prompt()
        await self.ask(prompt, 0)
        self.network.cut(self.workers[0].host, self.workers[1].host)
        await self.judge(prompt, lambda block: Cause.LOAD_FAILED, 1, policy="round-robin")
        self.network.mend_all()

    async def evicted_from_store(self) -> None:
        prompt = await self.pushed_out()
        kept = self.draw.randrange(len(prompt) // SIZE)
        for name in self.names(prompt)[kept:]:
            if name in self.store.chunks:
                self.store.evict(name)
        await asyncio.sleep(_SETTLED_S)
        await self.judge(prompt, lambda block: Cause.EVICTED)

    async def store_away(self) -> None:
        """And once more, as a store that has not answered is not called for a while.

        What pushed the second prompt out of the worker may have pushed the first one out of the store.
        """
        prompts = [await self.pushed_out(), await self.pushed_out()]
        self.store.away = True
        for prompt in prompts:
            stored = [name in self.store.chunks for name in self.names(prompt)]
            kept = [*stored, False].index(False)
            await self.judge(prompt, lambda block, kept=kept: Cause.LOAD_FAILED if block < kept else Cause.EVICTED)
        self.store.away = False

    async def aborted_store_away(self) -> None:
        """A load that fails is not the cause if the store was not said to have it."""
        self.store.away = True
        await self.aborted()
        self.store.away = False

    async def store_late(self) -> None:
        prompt = await self.pushed_out()
        self.network.cut(self.workers[0].host, store.HOST)
        await self.judge(prompt, lambda block: Cause.LOAD_FAILED)
        self.network.mend_all()

    async def store_late_midway(self) -> None:
        prompt = await self.pushed_out()
        self.store.late_after = self.draw.randrange(1, 4)
        await self.judge(prompt, lambda block: Cause.LOAD_FAILED)
        self.store.late_after = None

    # --- means

    def prompt(self, least: int = 4) -> list[int]:
        """Return a prompt with a length of its own, of ``least`` blocks at least."""
        length = self.draw.randrange(least * SIZE, (least + 12) * SIZE)
        return self.draw.choices(text.LETTERS, k=length)

    def leaving(self, prompt: list[int], shared: int) -> list[int]:
        """Return a prompt that has only its first ``shared`` tokens in common with ``prompt``."""
        others = [letter for letter in text.LETTERS if letter != prompt[shared]]
        return [*prompt[:shared], self.draw.choice(others), *self.prompt()]

    def names(self, prompt: Sequence[int]) -> Sequence[BlockHash]:
        return TokenSequence(root_hash(text.FINGERPRINT, b""), SIZE, prompt).block_hashes

    async def pushed_out(self, *more: Callable[[list[int]], Any]) -> list[int]:
        """Return a prompt that worker 0 has computed, and has no room for any more; do ``more`` with it before."""
        prompt = self.prompt()
        await self.ask(prompt)
        for each in more:
            await each(prompt)
        names, pool = set(self.names(prompt)), self.workers[0].core.scheduler.pool
        while names.intersection(pool.matchable_hashes()):
            await self.ask(self.draw.choices(text.LETTERS, k=FILLING * SIZE))
        return prompt

    async def ask(self, prompt: Sequence[int], worker: int = 0, **fields: Any) -> list[int]:
        """Serve ``prompt`` by ``worker``; return its answer once all else has settled."""
        answer, _ = await self._serve(prompt, worker, **fields)
        await asyncio.sleep(_SETTLED_S)
        return answer

    async def judge(self, prompt: Sequence[int], truth: Truth, worker: int = 0, **fields: Any) -> Explanation:
        """Serve ``prompt`` by ``worker``, and compare the causes of its computed blocks with the ``truth``."""
        _, explained = await self._serve(prompt, worker, **fields)
        assert explained is not None
        named = (len(prompt) - 1) // SIZE
        for run in explained.runs:
            if not isinstance(run.why, Source):
                for block in range(run.start // SIZE, (run.start + run.tokens + SIZE - 1) // SIZE):
                    self._count(run, block, truth(block) if block < named else Cause.TAIL)
        return explained

    def _count(self, run: Run, block: int, right: Cause) -> None:
        scenario = "tail" if right is Cause.TAIL else self._scenario
        verdict = "right" if run.why is right else "wrong" if run.certain else "uncertain"
        self.blocks[scenario, verdict] += 1
        self.blocks[scenario, "certain"] += run.certain
        if run.why is not right:
            self.errors.append(f"seed {self.seed}, {scenario}: block {block} is {right.name}, not {run}")

    async def _serve(
        self,
        prompt: Sequence[int],
        worker: int,
        *,
        salt: bytes = b"",
        policy: str = "",
        messages: tuple[int, ...] = (),
        abort_s: float | None = None,
    ) -> tuple[list[int], Explanation | None]:
        conductor, name = self.conductors[0], RequestId(f"r{self.next_number()}")
        chosen = self.workers[worker]
        model = conductor.dispatcher.registry.find_model(chosen.model)
        request = GenerationRequest(
            name,
            chosen.model,
            np.array(prompt, dtype=np.uint32),
            Sampling(temperature=0.0),
            StopRule(self.draw.randrange(1, 2 * SIZE), ignore_eos=True),
            salt,
            routing=RoutingOverrides(policy, chosen.id, chosen.id),
            client="one",
            explain=Audience.ADMIN,
            messages=messages,
        )
        call = GenerationCall(name, model, 1)
        conductor.run(call.begin, conductor.dispatcher, request, TextRules(), name, ())
        if abort_s is not None:
            self.loop.call_later(abort_s, conductor.run, call.abort)
        answer: list[int] = []
        while not call.ended:
            answer += [token for _, delta in await call.read() for token in delta.tokens]
        return answer, call.generations[0].stream.story.explanation

    # --- the life

    def _new_worker(self, number: int) -> SimWorker:
        self._generation += 1
        models = [OTHER] if number == 2 else []
        return SimWorker(number, self, Role.BOTH, self._generation, *models)

    async def _live(self) -> None:
        await self._begin()
        ticking = asyncio.create_task(self._tick_on())
        scenarios = self.scenarios()
        self.draw.shuffle(scenarios)
        for scenario in scenarios:
            self._scenario = scenario.__name__
            await scenario()
            await asyncio.sleep(_RECOVERED_S if scenario.__name__ in _HURTING else _SETTLED_S)
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        self._raise()

    async def _tick_on(self) -> None:
        while True:
            await asyncio.sleep(_SETTLED_S)
            self.instances.tick()
