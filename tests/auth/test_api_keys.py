"""API keys and their limits without processes: the file, the rights, the salts, the buckets in virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tanghulu.auth.api_keys import ApiKey, ApiKeysFile, ApiKeyTable, KeyLimits, KeyRight, new_key
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.key_limits import RATE_HEADERS, KeyAccount, KeyAccounts, RateLimitExceeded
from tanghulu.errors import ConfigError, Forbidden, Unauthorized

NO_LIMITS = KeyLimits()
SECRET = new_key()
ENTRY = f'[[keys]]\nname = "a"\ntenant = "acme"\nrights = ["inference"]\nsha256 = "{hash_of(SECRET)}"\n'


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def key(name: str = "a", limits: KeyLimits = NO_LIMITS, **fields: object) -> ApiKey:
    return ApiKey(name, hash_of(name), frozenset({KeyRight.INFERENCE}), limits=limits, **fields)


def test_a_key_says_whose_it_is_and_what_it_allows(tmp_path: Path) -> None:
    table = ApiKeysFile(write(tmp_path / "keys.toml", ENTRY)).table
    table.check()
    known = table.authenticate(SECRET)
    assert (known.name, known.tenant, known.weight, known.limits) == ("a", "acme", 1.0, KeyLimits())
    known.require(KeyRight.INFERENCE, "POST /v1/completions")
    with pytest.raises(Forbidden, match="GET /metrics needs the right 'metrics'; key 'a' has inference"):
        known.require(KeyRight.METRICS, "GET /metrics")
    for wrong in ("", SECRET + "x", hash_of(SECRET)):
        with pytest.raises(Unauthorized, match="unknown API key" if wrong else "requires an API key"):
            table.authenticate(wrong)
    assert SECRET not in repr(known) + repr(table)


def test_an_administrator_may_all_and_keys_expire() -> None:
    admin = ApiKey("b", hash_of("b"), frozenset({KeyRight.ADMIN}), expires_unix_s=100.0)
    assert all(admin.may(right) for right in KeyRight)
    table = ApiKeyTable([admin])
    assert table.authenticate("b", 99.0) is admin
    with pytest.raises(Unauthorized, match="has expired"):
        table.authenticate("b", 100.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ENTRY + "x = 1\n", "unknown field `x`"),
        (ENTRY.replace("inference", "fly"), "value 'fly'"),
        (ENTRY.replace('"inference"', ""), "has no rights"),
        (ENTRY.replace("acme", "Acme/"), "a name must have"),
        (ENTRY.replace('"a"', '"a b"'), "a name must have"),
        (ENTRY + ENTRY.replace(hash_of(SECRET), hash_of("y")), "two keys are named"),
        (ENTRY + ENTRY.replace('"a"', '"b"'), "have the same sha256"),
        (ENTRY.replace(hash_of(SECRET), SECRET), "64 hexadecimal digits"),
        (ENTRY + "requests_per_s = -1\n", r">= 0.0 - at `\$.keys\[0\].requests_per_s`"),
        (ENTRY + "tokens_per_minute = true\n", "Expected `float`, got `bool`"),
        (ENTRY + "weight = 0\n", "> 0.0"),
        (ENTRY + "weight = nan\n", "> 0.0"),
        (ENTRY + 'shared_prefixes = "yes"\n', "Expected `bool`"),
        (ENTRY + 'expires = "soon"\n', "'soon' is not a date"),
        ("[[keys", "cannot read"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ApiKeysFile(write(tmp_path / "keys.toml", text))
    assert "--api-keys" in caught.value.message


def test_a_changed_file_is_followed_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", json.dumps({"keys": [{"name": "a", "rights": ["admin"], "sha256": "0" * 64}]}))
    file = ApiKeysFile(path)
    assert not file.refresh()
    path.write_text("{")
    assert not file.refresh()
    assert list(file.table.keys) == ["a"]
    path.write_text(json.dumps({"keys": [{"name": "b", "rights": ["admin"], "sha256": "1" * 64}]}))
    assert file.refresh()
    assert list(file.table.keys) == ["b"]
    with pytest.raises(ConfigError, match="mode 0644"):
        ApiKeysFile(write(path, path.read_text(), 0o644))


def test_no_two_tenants_share_a_salt_and_nobody_can_name_anothers() -> None:
    acme, other, nobody = key(tenant="acme"), key("b", tenant="b"), key("c")
    shared = key("d", tenant="acme", shared_prefixes=True)
    assert acme.salted(b"s") != other.salted(b"s") != nobody.salted(b"s")
    assert nobody.salted(b"acme/s") != acme.salted(b"s")
    assert nobody.salted(acme.salted(b"s")) != acme.salted(b"s")
    assert shared.salted(b"s") == nobody.salted(b"s")
    assert key("e", tenant="acme").salted(b"s") == acme.salted(b"s")


def test_requests_a_second() -> None:
    account = KeyAccount(key(limits=KeyLimits(requests_per_s=2)), 0.0)
    for _ in range(2):
        account.begin(0.0)
    with pytest.raises(RateLimitExceeded, match="2 requests a second") as refused:
        account.begin(0.0)
    assert refused.value.retry_after_s == pytest.approx(0.5)
    assert account.num_in_flight == 2
    account.begin(0.5)
    headers = dict(account.headers(0.5))
    assert headers[b"x-ratelimit-limit-requests"] == b"2"
    assert headers[b"x-ratelimit-remaining-requests"] == b"0"
    assert headers[b"x-ratelimit-reset-requests"] == b"1.000s"
    assert {name.decode() for name in headers} <= set(RATE_HEADERS)


def test_less_than_a_request_a_second_is_still_one_at_a_time() -> None:
    account = KeyAccount(key(limits=KeyLimits(requests_per_s=0.1)), 0.0)
    account.begin(0.0)
    with pytest.raises(RateLimitExceeded):
        account.begin(9.0)
    account.begin(10.0)


def test_tokens_are_owed_and_paid_back() -> None:
    """The worked example of the module."""
    account = KeyAccount(key(limits=KeyLimits(tokens_per_minute=600)), 0.0)
    account.begin(0.0)
    account.spend(900, 0.0)
    assert dict(account.headers(0.0))[b"x-ratelimit-remaining-tokens"] == b"0"
    with pytest.raises(RateLimitExceeded, match="600 tokens a minute") as refused:
        account.begin(0.0)
    assert refused.value.retry_after_s == pytest.approx(30.1)
    account.begin(30.1)
    assert dict(account.headers(90.1))[b"x-ratelimit-remaining-tokens"] == b"600"


def test_requests_in_flight() -> None:
    account = KeyAccount(key(limits=KeyLimits(max_in_flight=1)), 0.0)
    account.begin(0.0)
    with pytest.raises(RateLimitExceeded, match="1 requests in flight"):
        account.begin(5.0)
    account.end()
    account.begin(5.0)


def test_accounts_follow_the_file_and_forget_what_is_gone() -> None:
    accounts = KeyAccounts()
    first = accounts.of(key(limits=KeyLimits(requests_per_s=1)), 0.0)
    first.begin(0.0)
    assert accounts.of(key(limits=KeyLimits(requests_per_s=5)), 0.0) is first
    assert first.limits.requests_per_s == 5
    accounts.of(key("b"), 0.0)
    accounts.keep(ApiKeyTable([key("c")]))  # a has a request under way, b has none
    accounts.check()
    assert accounts.of(key(), 0.0) is first
    accounts.spend("key nobody", 10, 0.0)
    first.end()
    accounts.keep(ApiKeyTable([key("c")]))
    assert accounts.of(key(), 0.0) is not first
