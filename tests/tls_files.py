"""Certificates for tests, made by openssl: an authority, and what it signs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_ADDRESSES = "subjectAltName=IP:127.0.0.1,DNS:localhost"


class Authority:
    """``sign`` makes NAME.pem and NAME.key in ``folder``; the authority's own is ca.pem."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("extra: openssl is not here")
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.ca = str(folder / "ca.pem")
        self._run("req", "-x509", *self._new("ca"), "-subj", "/CN=test authority", "-days", "2", "-out", self.ca)

    def sign(self, name: str, names: str = _ADDRESSES) -> tuple[str, str]:
        """(certificate, key) of a host with these names."""
        cert = str(self.folder / f"{name}.pem")
        signing = ("-CA", self.ca, "-CAkey", str(self.folder / "ca.key"), "-days", "2")
        self._run(
            "req", "-x509", *self._new(name), "-subj", f"/CN={name}", "-addext", names,
            "-addext", "basicConstraints=critical,CA:FALSE", *signing, "-out", cert,
        )  # fmt: skip
        return cert, str(self.folder / f"{name}.key")

    def _new(self, name: str) -> tuple[str, ...]:
        key = str(self.folder / f"{name}.key")
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)

    def _run(self, *arguments: str) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
