"""The load of an engine server: our own requests, those of others, and the speed measured from outside. Pure."""

from __future__ import annotations

import random

from tanghulu.conductor.engines.load import EngineBook, EngineFigures


def test_others_are_what_the_server_shows_beyond_ours():
    book = EngineBook(num_blocks=100, block_tokens=4)
    for name in ("a", "b", "c"):
        book.add(name, 40, 20, 1.0)
    for name in ("a", "b"):
        book.tokens(name, 1, 2.0)
    book.figures(EngineFigures(num_running=5, num_waiting=1, usage=0.4))
    load = book.load()
    assert (load.num_running, load.num_waiting) == (5, 1)
    assert load.prefill_tokens_waiting == 20
    assert load.blocks_free == 60
    assert load.prefill_pairs_waiting == 40**2 - 20**2
    book.check()


def test_blocks_are_in_use_before_the_server_shows_them():
    book = EngineBook(num_blocks=100, block_tokens=4)
    book.add("a", 80, 80, 1.0)
    assert book.load().blocks_free == 80


def test_a_server_without_figures_has_room():
    assert EngineBook(0, 1).load().blocks_free > 1 << 30


def test_speed_is_fitted_to_first_tokens_and_gaps():
    book, now_s, draw = EngineBook(1000, 4), 1.0, random.Random(7)
    for number in range(40):
        name, num = f"r{number}", draw.randrange(200, 4000)
        book.add(name, num, num, now_s)
        now_s += 0.01 + 1e-4 * num
        book.tokens(name, 1, now_s)
        for _ in range(20):
            now_s += 0.02
            book.tokens(name, 1, now_s)
        book.check()
        book.end(name)
        book.check()
    load = book.load()
    assert load.prefill is not None
    assert load.decode is not None
    assert abs(load.prefill.seconds(2000, 0) - 0.21) < 0.02
    assert abs(load.decode.seconds(1, 2000) - 0.02) < 0.002


def test_prompts_of_one_step_are_measured_together():
    """Their first tokens come one behind the other: the second did not take a microsecond."""
    book, now_s, draw = EngineBook(1000, 4), 1.0, random.Random(7)
    for number in range(20):
        names = {f"{number}/{i}": draw.randrange(200, 2000) for i in range(3)}
        for name, num in names.items():
            book.add(name, num, num, now_s)
        now_s += 0.01 + 1e-4 * sum(names.values())
        for name in names:
            now_s += 1e-6
            book.tokens(name, 1, now_s)
        now_s += 0.1
        for name in names:
            book.tokens(name, 1, now_s)
            book.end(name)
    assert abs(book.load().prefill.seconds(2000, 0) - 0.21) < 0.07


def test_a_prompt_between_two_tokens_is_no_gap():
    book = EngineBook(1000, 4)
    book.add("a", 40, 40, 1.0)
    for now_s in (2.0, 2.1, 2.2):
        book.tokens("a", 1, now_s)
    book.add("b", 40, 40, 2.2)
    book.tokens("b", 1, 9.0)
    book.tokens("a", 1, 9.1)  # it has waited for the prompt of b
    book.end("b")
    book.tokens("a", 1, 9.2)
    assert abs(book.load().decode_step_s - 0.1) < 1e-9


def test_one_slow_prompt_of_a_busy_machine_does_not_decide():
    book, now_s = EngineBook(1000, 4), 0.0
    for number, seconds in enumerate((1.0, 60.0, 1.0, 1.0, 1.0)):
        book.add(f"r{number}", 500, 500, now_s)
        now_s += seconds
        for each_s in (now_s, now_s + 0.1):
            book.tokens(f"r{number}", 1, each_s)
        assert abs(book.load().prefill_tokens_per_s - 500) < 1
        book.end(f"r{number}")
        now_s += 0.2
    assert abs(book.load().decode_step_s - 0.1) < 1e-9
