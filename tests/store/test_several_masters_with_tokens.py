"""Several masters behind tokens: those found in etcd, or named by a master, accept tokens derived for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.auth.credentials import Credentials
from tanghulu.masters import Masters
from tanghulu.store.directory_feed import DirectoryEventKind, follow_directory
from tests.store.cluster import eventually
from tests.store.elected_cluster import ElectedCluster
from tests.store.guarded_cluster import TOKENS, write_tokens


@pytest.fixture(scope="module")
def elected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElectedCluster]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(file, list(TOKENS))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TANGHULU_TOKEN", "secret-operator")
        cluster = ElectedCluster(2, 2, "64MiB", 2.0, "--tokens", str(file))
    with cluster:
        yield cluster


@pytest.mark.parametrize("typed", ["etcd", "one", "all"])
def test_a_client_reaches_every_owner(elected: ElectedCluster, typed: str) -> None:
    leader = elected.leader()
    others = [each for each in elected.masters if each is not leader]
    address = {"etcd": elected.finder_spec, "one": others[0].address, "all": elected.address}[typed]
    values = [(f"{typed}-{number}", b"x" * 1000) for number in range(64)]
    with tanghulu.connect(f"{address},{leader.address}" if typed == "one" else address, token="secret-acme") as acme:
        assert all(status.ok for status in acme.put_many(values))
        assert len({view.address for view in acme.masters()}) == 2
        eventually(lambda: all(acme.exists_many([key for key, _ in values])))
        assert len(list(acme.list_keys(f"{typed}-"))) == 64
        assert {view.num_chunks for view in acme.nodes()} == {0}
        assert acme.remove_matching(f"^{typed}-") == 64


async def test_asyncio_and_events(elected: ElectedCluster) -> None:
    masters = Masters.parse(elected.finder_spec).showing(Credentials("", "secret-acme"))
    seen: set[str] = set()
    async with aio.connect(elected.finder_spec, token="secret-acme") as acme:
        for number in range(8):
            await acme.put(f"ev/{number}", b"x")
        async for batch in follow_directory(masters, "ev/"):
            for event in batch:
                if event.kind is DirectoryEventKind.STORED:
                    seen.update(event.keys)
            if len(seen) == 8:
                break
        assert seen == {f"ev/{number}" for number in range(8)}
