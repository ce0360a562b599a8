"""The figures of the last minutes: quantiles as Prometheus computes them, ratios, and points that stay few."""

import math

from tanghulu.conductor.dashboard import RequestHistory, Totals, quantile
from tanghulu.store.dashboard.history import MAX_SAMPLES, ratio

BOUNDS = (1.0, 2.0, math.inf)


def test_quantiles():
    assert quantile(0.75, BOUNDS, (5, 10, 10)) == 1.5
    assert quantile(0.25, BOUNDS, (5, 10, 10)) == 0.5
    assert quantile(0.99, BOUNDS, (0, 0, 10)) == 2.0  # beyond all bounds: the last that is known
    assert quantile(0.5, BOUNDS, (0, 0, 0)) is None
    assert quantile(0.5, (), ()) is None


def test_a_ratio_of_nothing_is_none():
    assert ratio(0, 0) is None
    assert ratio(1, 4) == 0.25


def test_now_looks_back_a_minute():
    history = RequestHistory(BOUNDS, BOUNDS)
    assert history.now() == {}
    for second in range(200):
        # one request a second until 100, then two; of the second kind three quarters are cached
        ended = second + max(0, second - 100)
        cached = max(0, second - 100) * 150
        prompt = second * 100 + max(0, second - 100) * 100
        history.append(1000.0 + second, Totals(prompt, cached, 10 * ended, ended, ttft=(ended, ended, ended)))
    now = history.now()
    assert now["requests_per_s"] == 2
    assert now["tokens_per_s"] == 20
    assert now["hit_ratio"] == 0.75
    assert now["hit_ratio_total"] == cached / prompt
    assert now["ttft_p50_s"] == 0.5
    assert now["tbt_p50_s"] is None


def test_few_points_and_bounded_samples():
    history = RequestHistory(BOUNDS, BOUNDS)
    for second in range(2 * MAX_SAMPLES):
        history.append(float(second), Totals(in_flight=second))
    assert len(history) == MAX_SAMPLES
    points = history.points(100)
    assert len(points) <= 100
    assert points[-1]["at_s"] == 2 * MAX_SAMPLES - 1
    assert [point["at_s"] for point in points] == sorted(point["at_s"] for point in points)
    history = RequestHistory(BOUNDS, BOUNDS)
    assert history.points(100) == []
