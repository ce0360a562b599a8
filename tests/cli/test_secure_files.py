"""What `tanghulu up --secure` keeps: no key that could sign further certificates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tanghulu.auth.certificate_roles import ROLES, has_roles
from tanghulu.cli import secure
from tanghulu.errors import ConfigError


def _certificates(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "certs").iterdir()}


def test_the_authority_s_key_goes_and_certificates_stay_until_they_are_old(tmp_path: Path) -> None:
    files = secure.prepare(tmp_path, ("127.0.0.1",))
    made = _certificates(tmp_path)
    assert set(made) == {"ca.pem", *(f"{role}.{kind}" for role in ROLES for kind in ("pem", "key"))}
    assert has_roles(str(files.authority))
    for role in ("master", "node", "prefill", "decode", "worker", "vllm-worker", "conductor", "gateway"):
        options = files.options(role)
        for flag in ("--tls-cert", "--tls-key", "--tls-ca"):
            assert Path(options[options.index(flag) + 1]).exists(), (role, flag)
    secure.prepare(tmp_path, ("127.0.0.1",))
    assert _certificates(tmp_path) == made
    os.utime(files.authority, (0, 0))
    secure.prepare(tmp_path, ("127.0.0.1",))
    renewed = _certificates(tmp_path)
    assert set(renewed) == set(made)
    assert all(renewed[name] != made[name] for name in made)
    (tmp_path / "certs" / "node.pem").unlink()
    secure.prepare(tmp_path, ("127.0.0.1",))
    assert set(_certificates(tmp_path)) == set(made)


def test_certificates_that_lack_a_host_are_made_anew(tmp_path: Path) -> None:
    secure.prepare(tmp_path, ("10.0.0.15",))
    made = _certificates(tmp_path)
    for host in ("10.0.0.15", "127.0.0.1"):
        secure.prepare(tmp_path, (host,))
        assert _certificates(tmp_path) == made
    secure.prepare(tmp_path, ("0.0.0.15",))
    renewed = _certificates(tmp_path)
    assert all(renewed[name] != made[name] for name in made)
    secure.prepare(tmp_path, ("0.0.0.15",))
    assert _certificates(tmp_path) == renewed


def test_a_key_that_is_gone_is_named(tmp_path: Path) -> None:
    secure.prepare(tmp_path, ()).key_file.unlink()
    with pytest.raises(ConfigError, match=r"api\.key is missing: restore it, or make another key with `tanghulu keys"):
        secure.prepare(tmp_path, ())


def test_an_authority_s_key_of_an_interrupted_start_goes(tmp_path: Path) -> None:
    secure.certs.make(tmp_path / "certs", ("127.0.0.1",), 1)
    assert (tmp_path / "certs" / "ca.key").exists()
    secure.prepare(tmp_path, ("127.0.0.1",))
    assert not (tmp_path / "certs" / "ca.key").exists()
