"""A quota for all nodes together, with real processes: kept within seconds, wherever the tenant puts."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tanghulu.auth.tenants import hash_of
from tanghulu.cli.store import COMMAND as STORE
from tanghulu.errors import InvalidRequest
from tanghulu.store.client import Client
from tests.store.cluster import eventually
from tests.store.guarded_cluster import Secured

MIB = 1 << 20
FILE = """
[tenants.acme]
cluster_quota = "12MiB"
""" + "".join(
    f"""
[[tokens]]
name = "{name}"
{tenant}
rights = ["{right}"]
sha256 = "{hash_of("secret-" + name)}"
"""
    for name, tenant, right in (
        ("node", "", "admin"),
        ("operator", "", "admin"),
        ("acme", 'tenant = "acme"', 'read", "write'),
    )
)


def held(client: Client) -> int:
    (acme,) = [each for each in client.tenants() if each.tenant == "acme"]
    return acme.used_bytes


@pytest.mark.slow
def test_what_a_tenant_holds_on_all_nodes_is_bounded_and_its_puts_do_not_fail(tmp_path: Path) -> None:
    file = tmp_path / "tokens.toml"
    file.touch(mode=0o600)
    file.write_text(FILE)
    with Secured(file, num_nodes=3) as cluster, cluster.connect("acme") as acme, cluster.connect("operator") as all_:
        eventually(lambda: len(all_.nodes()) == 3)
        names = [node.id for node in all_.nodes()]
        all_.put("plain", bytes(8 * MIB), prefer_node=names[0])
        for name in names:  # its clients move from node to node
            for number in range(20):
                assert acme.put(f"{name}/{number}", bytes(MIB), prefer_node=name).ok
                assert acme.exists(f"{name}/{number}")
            eventually(lambda: 0 < held(all_) <= 12 * MIB)
            assert acme.exists(f"{name}/19"), "what came last is there"
        (mine,) = acme.tenants()
        assert mine.cluster_quota_bytes == 12 * MIB
        assert mine.share == pytest.approx(mine.used_bytes / sum(node.capacity_bytes for node in all_.nodes()))
        shown = CliRunner().invoke(STORE, ["tenants", "--master", cluster.address, "--token", "secret-acme"])
        assert "12.0 MiB in all" in shown.stdout
        with pytest.raises(InvalidRequest, match="on all nodes"):
            acme.put("large", bytes(13 * MIB))
        assert all_.exists("plain"), "nobody else pays for it"
