"""`tanghulu keys`: what it makes works, is listed, and is gone when it is revoked."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tanghulu.auth.api_keys import ApiKeysFile, KeyLimits, KeyRight
from tanghulu.auth.cluster_secret import ClusterSecret, make_cluster_secret, read_cluster_secret
from tanghulu.cli.keys import COMMAND
from tanghulu.errors import ConfigError, InvalidRequest


def run(*arguments: object) -> Result:
    return CliRunner().invoke(COMMAND, [str(each) for each in arguments], catch_exceptions=False)


def test_a_key_is_made_listed_and_revoked(tmp_path: Path) -> None:
    file = tmp_path / "sub" / "keys.toml"
    key = run("create", file, "acme", "--tenant", "acme", "--requests-per-s", 2, "--weight", 3).output.strip()
    second = json.loads(run("create", file, "ops", "--right", "admin", "--json").output)["key"]
    assert file.stat().st_mode & 0o777 == 0o600
    table = ApiKeysFile(file).table
    known = table.authenticate(key)
    assert (known.name, known.tenant, known.limits, known.weight) == ("acme", "acme", KeyLimits(2.0), 3.0)
    assert table.authenticate(second).rights == {KeyRight.ADMIN}
    assert key not in file.read_text()
    listed = run("list", file).output
    assert "acme: inference  tenant=acme requests_per_s=2.0 weight=3.0" in listed
    assert "ops: admin\n" in listed
    assert [row["name"] for row in json.loads(run("list", file, "--json").output)] == ["acme", "ops"]
    file.write_text("# a remark\n" + file.read_text())
    assert "is revoked" in run("revoke", file, "acme").output
    assert list(ApiKeysFile(file).table.keys) == ["ops"]
    assert file.read_text().startswith("# a remark\n")
    run("revoke", file, "ops")
    assert not ApiKeysFile(file).table.keys


def test_what_cannot_be_is_said_and_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    run("create", file, "a")
    before = file.read_text()
    with pytest.raises(ConfigError, match="two keys are named 'a'"):
        run("create", file, "a")
    for name in ('b"', "\N{GRINNING FACE}", "\udcff"):
        with pytest.raises(ConfigError, match="a name must have"):
            run("create", file, name)
    with pytest.raises(InvalidRequest, match="has no key 'b'"):
        run("revoke", file, "b")
    with pytest.raises(ConfigError, match="TOML files only"):
        run("create", tmp_path / "keys.json", "a")
    assert file.read_text() == before


def test_the_file_behind_a_link_is_changed_and_the_link_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "elsewhere" / "real.toml", tmp_path / "link.toml"
    run("create", real, "first")
    link.symlink_to(Path("elsewhere", "real.toml"))
    run("create", link, "second")
    assert list(ApiKeysFile(real).table.keys) == ["first", "second"]
    run("revoke", link, "first")
    assert (list(ApiKeysFile(real).table.keys), link.is_symlink()) == (["second"], True)
    assert not list(tmp_path.glob(".link*"))


def test_errors_name_the_file_that_was_given(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    run("create", file, "a")
    for name in ("a", "b\n"):
        with pytest.raises(ConfigError) as caught:
            run("create", file, name)
        assert str(file) in caught.value.message
        assert "--api-keys" not in caught.value.message
        assert ".new" not in caught.value.message
    assert [path.name for path in tmp_path.glob("*.new*")] == []
    file.write_bytes(b"# f\xfcr alle\n")
    with pytest.raises(ConfigError, match=r"keys\.toml"):
        run("create", file, "b")


def test_json_has_the_weight_that_counts(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    run("create", file, "a")
    [row] = json.loads(run("list", file, "--json").output)
    assert row["weight"] == 1.0
    assert run("list", file).output == "a: inference\n"


def test_a_cluster_secret_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "of" / "cluster.secret"
    made = CliRunner().invoke(COMMAND, ["secret", str(file)])
    assert made.output == f"--cluster-secret @{file}\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = read_cluster_secret(f"@{file}")
    assert secret
    refused = CliRunner().invoke(COMMAND, ["secret", str(file)])
    assert isinstance(refused.exception, ConfigError)
    assert read_cluster_secret(f"@{make_cluster_secret(file)}") == secret
    assert make_cluster_secret(tmp_path / "other") != file
    with pytest.raises(ConfigError, match="has 5 characters; it needs at least 32"):
        read_cluster_secret("short")
    with pytest.raises(ConfigError, match="cannot read the cluster secret"):
        read_cluster_secret(f"@{tmp_path}/none")
    assert not read_cluster_secret("")
    assert "s" * 32 not in repr(read_cluster_secret("s" * 32))


def test_keys_of_a_secret_are_unlike_each_other() -> None:
    one, other = ClusterSecret("s" * 32), ClusterSecret("t" * 32)
    keys = [key for secret in (one, other) for key in (secret.naming_key, secret.signing_key, secret.check_value)]
    assert len({key[:8] for key in keys}) == 6
    assert ClusterSecret("").check_value == b""
