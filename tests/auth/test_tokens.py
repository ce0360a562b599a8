"""Tokens and tenants without processes: the table, the file, the scope of keys."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials, from_metadata, read_token
from tanghulu.auth.derived_tokens import hash_of, is_token
from tanghulu.auth.tenants import Identity, Right, TokenTable, new_token, scope_of, tenant_of
from tanghulu.auth.tokens import TokensFile, load
from tanghulu.cli.store_admin import token as token_command
from tanghulu.errors import ConfigError, Forbidden, InvalidRequest, Unauthorized
from tanghulu.masters import Masters
from tanghulu.types import MAX_KEY_BYTES, Address

SECRET = new_token()
ENTRY = f'[[tokens]]\nname = "a"\ntenant = "acme"\nrights = ["read"]\nsha256 = "{hash_of(SECRET)}"\n'


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def table(text: str, tmp_path: Path) -> TokenTable:
    made = load(write(tmp_path / "tokens.toml", text))
    made.check()
    return made


def test_a_token_says_whose_it_is(tmp_path: Path) -> None:
    known = table(ENTRY, tmp_path)
    identity = known.authenticate(Credentials("", SECRET))
    assert (identity.tenant, identity.scope, identity.shared_memory) == ("acme", "@acme/", False)
    assert known.authenticate(Credentials("acme", SECRET)) == identity
    identity.require(Right.READ, "get")
    with pytest.raises(Forbidden, match="put needs the right 'write'; token 'a' has read"):
        identity.require(Right.WRITE, "put")
    assert identity.unscoped(identity.scoped("k")) == "k"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no token"),
        (ENTRY + "x = 1\n", "unknown field `x`"),
        (ENTRY.replace("read", "fly"), "value 'fly'"),
        (ENTRY.replace("read", "admin"), "'admin' is for operators, because it sees all"),
        (ENTRY.replace("read", "metrics"), "'metrics' is for operators"),
        (
            ENTRY.replace("read", "join"),
            "'join' is for operators, because processes of the",
        ),
        (ENTRY.replace("acme", "Acme/"), "a name must have"),
        (ENTRY + ENTRY, "have the same sha256"),
        (ENTRY.replace(hash_of(SECRET), SECRET), "64 hexadecimal digits"),
        (ENTRY + '[tenants.acme]\nquota = "much"\n', "'much'"),
        (ENTRY + 'expires = "soon"\n', "'soon' is not a date"),
        ("[[tokens", "cannot read"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        table(text, tmp_path)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode 0640"):
        load(write(tmp_path / "t.toml", ENTRY, 0o640))
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "missing.toml")


def test_a_credential_of_systemd_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "t.toml", ENTRY)
    for mode, folder, refused in (
        (0o440, tmp_path, False),
        (0o440, tmp_path.parent, True),
        (0o444, tmp_path, True),
        (0o460, tmp_path, True),
    ):
        roots = os.stat_result((mode, 1, 1, 1, 0, 0, 1, 0, 0, 0))
        monkeypatch.setattr(os, "fstat", lambda _, roots=roots: roots)
        monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(folder))
        with pytest.raises(ConfigError, match=f"mode {mode:04o}") if refused else nullcontext():
            assert len(load(path)) == 1


def test_json_is_the_same(tmp_path: Path) -> None:
    content = {
        "tenants": {"acme": {"quota": "1MiB", "shared_memory": True}},
        "tokens": [{"name": "a", "tenant": "acme", "rights": ["read"], "sha256": hash_of(SECRET)}],
    }
    known = load(write(tmp_path / "tokens.json", json.dumps(content)))
    assert known.tenants["acme"].quota_bytes == 1 << 20
    assert known.authenticate(Credentials("", SECRET)).shared_memory, "it is mapped for reading only"
    for rights, maps in ((["write"], False), (["read", "write"], True)):
        content["tokens"][0]["rights"] = rights  # type: ignore[index]
        other = load(write(tmp_path / "tokens.json", json.dumps(content))).authenticate(Credentials("", SECRET))
        assert other.shared_memory is maps, "who maps memory can read it"


def test_tokens_expire(tmp_path: Path) -> None:
    known = table(ENTRY + "expires = 2026-01-01\n", tmp_path)
    before, after = 1767225599.0, 1767225600.0
    identity = known.authenticate(Credentials("", SECRET), before)
    assert known.still_stands(identity, before)
    assert not known.still_stands(identity, after)
    with pytest.raises(Unauthorized, match="expired"):
        known.authenticate(Credentials("", SECRET), after)


def test_a_derived_token_is_of_use_at_one_address_alone(tmp_path: Path) -> None:
    file = TokensFile(write(tmp_path / "tokens.toml", ENTRY))
    here, elsewhere = Address("10.0.0.7", 8100), Address("10.0.0.8", 8100)
    own = Credentials("", SECRET)
    shown = own.to(here)
    assert SECRET not in shown.token
    assert hash_of(SECRET) not in shown.token
    assert NOTHING_TO_SHOW.to(here) == NOTHING_TO_SHOW
    with pytest.raises(Unauthorized, match="another address than none"):
        file.authenticate(shown)
    file.answer_at(elsewhere)
    with pytest.raises(Unauthorized, match=r"token 'a' was derived for another address than 10\.0\.0\.8:8100"):
        file.authenticate(shown)
    file.answer_at(here)
    assert file.authenticate(shown) == file.authenticate(own) == file.authenticate(own.to(elsewhere))
    path = "/run/node.sock"
    with pytest.raises(Unauthorized, match="another address"):
        file.authenticate(own.to(here, path))
    file.answer_at(here, unix_path=path)
    assert file.authenticate(own.to(here, path)) == file.authenticate(shown)
    file.answer_at(Address("0.0.0.0", 8100))
    with pytest.raises(Unauthorized, match="another address"):
        file.authenticate(own.to(Address("0.0.0.0", 8100)))
    for forged in (shown.token[:-1] + "g", shown.token + "0", "tgd_", "tgd__", "tgd_ü_ü", "tgd_" + "0" * 16 + "_0"):
        with pytest.raises(Unauthorized):
            file.authenticate(Credentials("", forged))
    with pytest.raises(Unauthorized, match="does not belong to tenant"):
        file.authenticate(replace(shown, tenant="initech"))


def test_a_process_without_a_tokens_file_knows_its_own_token() -> None:
    here = Address("h", 1)
    assert is_token(SECRET, SECRET, [])
    assert is_token(SECRET, Credentials("", SECRET).to(here).token, ["x:1", "h:1"])
    derived = Credentials("", SECRET).to(here).token
    for wrong in ("", "guess", "tgd_", derived[:-1], Credentials("", "b").to(here).token):
        assert not is_token(SECRET, wrong, ["h:1"])
    assert not is_token(SECRET, derived, ["x:1"])


def test_a_changed_file_is_read_again_and_a_broken_one_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens.toml", ENTRY)
    file = TokensFile(path)
    identity = file.table.authenticate(Credentials("", SECRET))
    assert not file.refresh()
    write(path, ENTRY + "broken")
    assert not file.refresh()
    assert file.table.still_stands(identity, 0.0)
    write(path, ENTRY.replace('["read"]', '["read", "write"]'))
    assert file.refresh()
    assert not file.table.still_stands(identity, 0.0), "its rights have changed: it has to ask again"
    write(path, ENTRY + ENTRY.replace(hash_of(SECRET), hash_of("other")))
    assert file.refresh()
    assert file.table.still_stands(identity, 0.0)


def test_scoped_keys_stay_within_bounds() -> None:
    identity = Identity("a", frozenset({Right.READ}), "acme")
    longest = "k" * (MAX_KEY_BYTES - len("@acme/"))
    assert len(identity.scoped(longest)) == MAX_KEY_BYTES
    for key in (longest + "k", "é" * (MAX_KEY_BYTES // 2)):
        with pytest.raises(InvalidRequest, match="at most 1018 bytes"):
            identity.scoped(key)
    assert Identity("o", frozenset({Right.ADMIN})).scoped("k" * MAX_KEY_BYTES) == "k" * MAX_KEY_BYTES


def test_whose_key_it_is() -> None:
    assert tenant_of(scope_of("acme") + "a/b") == "acme"
    assert tenant_of("kv/1/2/0") == tenant_of("@acme") == ""


def test_credentials_travel_in_metadata_and_with_the_masters(tmp_path: Path) -> None:
    shown = Credentials("acme", SECRET)
    assert from_metadata(shown.metadata) == shown
    assert from_metadata(()) == Credentials()
    assert Credentials().metadata == ()
    assert SECRET not in repr(Masters.parse("h:1").showing(shown))
    assert read_token("@" + str(write(tmp_path / "token", SECRET + "\n"))) == SECRET
    with pytest.raises(ConfigError, match="missing"):
        read_token(f"@{tmp_path}/missing")


def test_the_command_makes_an_entry_that_fits(tmp_path: Path) -> None:
    made = CliRunner().invoke(token_command, ["engines", "--tenant", "acme", "--right", "read"])
    assert made.exit_code == 0
    identity = table(made.stderr, tmp_path).authenticate(Credentials("", made.stdout.strip()))
    assert (identity.token_name, identity.tenant, identity.rights) == ("engines", "acme", {Right.READ})
    shown = json.loads(CliRunner().invoke(token_command, ["root", "--json"]).stdout)
    assert shown["entry"]["sha256"] == hash_of(shown["token"])
    assert shown["entry"]["rights"] == ["admin"]
    with pytest.raises(ConfigError, match="token 'a\"b': a name must have"):
        CliRunner().invoke(token_command, ['a"b'], catch_exceptions=False)
