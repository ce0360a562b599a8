"""What `tanghulu up --secure` keeps: no key that could sign further certificates."""

from __future__ import annotations

import os
from pathlib import Path

from tanghulu.auth.certificate_roles import ROLES, has_roles
from tanghulu.cli import secure


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


def test_an_authority_s_key_of_an_interrupted_start_goes(tmp_path: Path) -> None:
    secure.certs.make(tmp_path / "certs", ("127.0.0.1",), 1)
    assert (tmp_path / "certs" / "ca.key").exists()
    secure.prepare(tmp_path, ("127.0.0.1",))
    assert not (tmp_path / "certs" / "ca.key").exists()
