"""A store's figures from its nodes' counters."""

from tanghulu.store.dashboard.history import MAX_SAMPLES, History, StoreCounters, StoreHistory


def test_counters_are_read_from_a_page_of_metrics():
    page = [("tanghulu_node_hits_total", {}, 3.0), ("tanghulu_node_read_bytes_total", {"transport": "shm"}, 5.0)]
    page += [("tanghulu_node_read_bytes_total", {"transport": "tcp"}, 6.0), ("another_total", {}, 9.0)]
    assert StoreCounters.on(page) == StoreCounters(hits=3, read_bytes=11)


def test_rates_look_back_a_minute():
    history = StoreHistory()
    assert history.now() == {}
    for second in range(200):
        # two gets a second, of which one finds its key until 100, then both
        hits = second + max(0, second - 100)
        history.observe(1000.0 + second, {"a": StoreCounters(hits, 2 * second - hits, read_bytes=10 * second)})
    now = history.now()
    assert now["gets_per_s"] == 2
    assert now["get_hit_ratio"] == 1
    assert now["get_hit_ratio_total"] == hits / 398
    assert now["read_bytes_per_s"] == 10
    assert history.points(10)[0]["get_hit_ratio"] == 0.5
    assert history.points(10)[-1]["get_hit_ratio"] == 1


def test_nodes_that_come_restart_and_go():
    history = StoreHistory()
    history.observe(1.0, {"a": StoreCounters(hits=100)})
    history.observe(2.0, {"a": StoreCounters(hits=110), "b": StoreCounters(hits=1000)})
    assert history.grown.hits == 10, "what b did before it was seen is none of this minute"
    history.observe(3.0, {"a": StoreCounters(hits=4)})
    assert history.grown.hits == 14, "a began anew"
    history.observe(4.0, {"a": StoreCounters(hits=4), "b": StoreCounters(hits=1001)})
    assert history.grown.hits == 15
    assert history.now()["gets_per_s"] == 5


class _Plain(History[int]):
    def figures(self, seconds, first, last):
        return {"seconds": seconds, "first": first, "last": last}


def test_samples_are_bounded():
    log = _Plain()
    assert log.now() == {}
    for second in range(2 * MAX_SAMPLES):
        log.append(float(second), second)
    assert len(log) == MAX_SAMPLES
    assert log.now() == {"seconds": 60.0, "first": 2 * MAX_SAMPLES - 61, "last": 2 * MAX_SAMPLES - 1}
    assert len(log.points(100)) <= 100
