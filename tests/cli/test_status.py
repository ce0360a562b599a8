"""``tanghulu status``: what a line says, and a real cluster's."""

import json

from click.testing import CliRunner

from tanghulu.cli.main import root
from tanghulu.cli.status import part_of, part_of_master, problems_of
from tanghulu.discovery.base import Instance
from tanghulu.runtime.scraping import samples_in, summed
from tanghulu.store.client.model import MasterView
from tanghulu.types import Address, InstanceId, Role
from tests.store.cluster import Cluster

PAGE = """# TYPE tanghulu_node_hits_total counter
tanghulu_node_hits_total{tenant="a"} 2
tanghulu_node_hits_total{tenant="b"} 1
# TYPE tanghulu_node_misses_total counter
tanghulu_node_misses_total 1
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1000
"""


def _instance(role, name="x"):
    return Instance(InstanceId(f"{role.value}-{name}"), role, Address("h", 1), metrics_address="h:2")


def test_a_line_sums_over_labels():
    part = part_of(_instance(Role.NODE), summed(samples_in(PAGE)), None, 1060.0)
    assert (part.health, part.hit_ratio, part.uptime_s) == ("up", 0.75, 60.0)


def test_a_worker_and_a_conductor_say_what_they_do():
    worker = {"requests_running": 2, "requests_waiting": 1, "blocks_in_use": 5, "blocks_capacity": 20}
    figures = {f"tanghulu_worker_{name}": float(value) for name, value in worker.items()}
    assert part_of(_instance(Role.DECODE), figures, None, 0.0).load == "2 running, 1 waiting, 25% of blocks in use"
    figures["tanghulu_worker_kv_token_bytes"] = 12_288.0
    assert part_of(_instance(Role.DECODE), figures, None, 0.0).load.endswith(", 12.0 KiB of KV a token")
    figures = {"tanghulu_conductor_cached_tokens_total": 25.0, "tanghulu_conductor_prompt_tokens_total": 100.0}
    part = part_of(_instance(Role.CONDUCTOR), figures, None, 0.0)
    assert (part.load, part.hit_ratio) == ("0 in flight, 0 queued", 0.25)


def test_a_master_that_is_registered_says_what_it_owns():
    registered = part_of(_instance(Role.MASTER), {}, None, 0.0)
    view = MasterView("h:1", tuple(range(8)), 3, num_keys=5, num_rebuilding=2)
    part = part_of_master(view, registered, "h:1")
    assert (part.id, part.address, part.load) == ("master-x", "h:1", "5 keys, 2 of 8 ranges rebuilding")
    silent = part_of_master(MasterView("h:2", (), 0, answers=False), None, "h:2")
    assert problems_of([silent])[0] == "master does not answer at h:2"


def test_problems_name_who_is_silent_and_who_is_missing():
    def parts(*roles, figures):
        return [part_of(_instance(role), figures, None, 0.0) for role in roles]

    assert problems_of(parts(Role.NODE, Role.BOTH, Role.CONDUCTOR, figures={})) == []
    assert problems_of(parts(Role.NODE, figures=None)) == ["node-x does not answer at h:2"]
    found = problems_of(parts(Role.CONDUCTOR, Role.PREFILL, figures={}))
    assert found == [
        "no store node is registered: nothing can be stored",
        "no decode worker is registered: requests wait",
    ]


def test_a_real_cluster():
    with Cluster(2) as cluster:
        asked = ["status", "--master", cluster.address]
        done = CliRunner().invoke(root, [*asked, "--json"])
        assert done.exit_code == 0, done.output
        status = json.loads(done.output)
        master, *nodes = status["parts"]
        assert (master["role"], master["address"], master["load"]) == ("master", cluster.address, "0 keys, leads")
        assert [part["role"] for part in nodes] == ["node", "node"]
        assert all(part["health"] == "up" and "256.0 MiB" in part["load"] for part in nodes)
        done = CliRunner().invoke(root, asked)
        for part in status["parts"]:
            assert part["id"] in done.output


def test_without_a_master_the_command_says_so():
    done = CliRunner().invoke(root, ["status", "--master", "127.0.0.1:1"])
    assert done.exit_code != 0
    assert done.exception is not None
    assert "127.0.0.1:1" in str(done.exception)
