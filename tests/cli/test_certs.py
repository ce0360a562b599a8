"""``tanghulu certs init``: what it makes is what masters, nodes and clients accept, and nobody else's."""

import asyncio
import os
import re
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tanghulu
from tanghulu.auth.certificate_roles import ROLES
from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.cli.certs import make
from tanghulu.cli.main import root
from tanghulu.discovery.base import Instance
from tanghulu.discovery.master import MasterDiscovery
from tanghulu.errors import ConfigError, Forbidden, TanghuluError
from tanghulu.masters import Masters
from tanghulu.rpc.fast_aio import AsyncFastConnection
from tanghulu.store.protocol.announcements import NodeAnnouncement
from tanghulu.store.protocol.methods import ANNOUNCE
from tanghulu.types import Address, InstanceId, Role
from tests.store.cluster import Process


def test_files_and_modes(tmp_path):
    folder = tmp_path / "certs"
    done = CliRunner().invoke(root, ["certs", "init", str(folder), "--host", "node-1.example", "--host", "10.0.0.7"])
    assert done.exit_code == 0, done.output
    names = {f"{name}.{kind}" for name in ("ca", *ROLES) for kind in ("pem", "key")}
    assert set(os.listdir(folder)) == names
    assert {os.stat(folder / name).st_mode & 0o777 for name in names if name.endswith(".key")} == {0o600}
    assert os.stat(folder).st_mode & 0o777 == 0o700
    for role in ROLES:
        context = ssl.create_default_context(cafile=folder / "ca.pem")
        context.load_cert_chain(folder / f"{role}.pem", folder / f"{role}.key")


@pytest.mark.slow
def test_the_commands_of_security_md(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    block = re.search(r"```sh\n(.*?)```", page, re.DOTALL)[1]
    program = tmp_path / "tanghulu"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tanghulu "$@"\n')
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-ec", block], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {"certs", "keys.toml", "tokens.toml", "cluster.secret"} <= set(os.listdir(tmp_path / "secrets"))
    assert re.search(r"tgh_\w+", done.stdout)
    assert "[[tokens]]" in done.stderr


def test_what_is_there_stays(tmp_path):
    make(tmp_path, ("localhost",), 1)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    (tmp_path / "node.pem").unlink()
    assert [path.name for path in make(tmp_path, ("localhost",), 1)] == ["node.key", "node.pem"]
    for name, data in before.items():
        assert name.startswith("node.") or (tmp_path / name).read_bytes() == data
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigError, match="has only one of"):
        make(tmp_path, ("localhost",), 1)


def test_what_cannot_be_is_said_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"--host 'bücher\.example' is neither an address nor an ASCII name"):
        make(tmp_path / "new", ("bücher.example",), 1)
    assert not (tmp_path / "new").exists()
    make(tmp_path, ("localhost",), 1)
    for file in ("ca.key", "ca.pem"):
        sound = (tmp_path / file).read_bytes()
        (tmp_path / file).write_text("nonsense")
        with pytest.raises(ConfigError, match=r"cannot read .*ca\.pem and .*ca\.key: .*; restore them"):
            make(tmp_path, ("localhost",), 1)
        (tmp_path / file).write_bytes(sound)


def test_a_master_lets_in_whom_its_authority_signed(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    make(ours, ("127.0.0.1", "localhost"), 1)
    make(theirs, ("127.0.0.1", "localhost"), 1)
    flags = ("--tls-cert", str(ours / "master.pem"), "--tls-key", str(ours / "master.key"))
    master = Process(
        "tanghulu.store.master.main", "--port", "0", *flags, "--tls-mutual", "--tls-ca", str(ours / "ca.pem")
    )
    try:

        def nodes(folder, ca):
            shown = {"tls_cert": str(folder / "client.pem"), "tls_key": str(folder / "client.key")}
            with tanghulu.connect(master.address, transport="tcp", tls_ca=str(ca / "ca.pem"), **shown) as store:
                return store.nodes()

        assert nodes(ours, ours) == []
        for folder, ca in ((theirs, ours), (ours, theirs)):
            with pytest.raises(TanghuluError):
                nodes(folder, ca)
    finally:
        master.stop()


def test_a_process_registers_in_the_role_of_its_certificate(tmp_path):
    make(tmp_path, ("127.0.0.1", "localhost"), 1)

    def shown(role):
        return TlsFiles(str(tmp_path / f"{role}.pem"), str(tmp_path / f"{role}.key"), str(tmp_path / "ca.pem"))

    tls = shown("master")
    flags = ("--tls-cert", tls.cert, "--tls-key", tls.key, "--tls-ca", tls.ca, "--tls-mutual")
    master = Process("tanghulu.store.master.main", "--port", "0", *flags)

    async def register(certificate, role):
        masters = Masters((Address.parse(master.address),), credentials=Credentials(tls=shown(certificate)))
        instance = Instance(InstanceId(f"{certificate}-as-{role.value}"), role, Address("127.0.0.1", 1))
        async with MasterDiscovery(masters) as discovery:
            await (await discovery.register(instance)).close()

    async def announce(certificate):
        connection = await AsyncFastConnection.connect(
            Address.parse(master.address), tls=shown(certificate).to("master")
        )
        call = ANNOUNCE.call(NodeAnnouncement("n", 1))
        try:
            await connection.call(call.method, call.request, call.reply_type, deadline_s=30)
        finally:
            await connection.close()

    try:
        with pytest.raises(Forbidden, match="to announce chunks requires a certificate with the role node"):
            asyncio.run(announce("worker"))
        asyncio.run(register("worker", Role.DECODE))
        asyncio.run(register("node", Role.NODE))
        for certificate, role in (("client", Role.DECODE), ("worker", Role.NODE), ("conductor", Role.MASTER)):
            with pytest.raises(Forbidden, match=f"requires a certificate .*the one presented has {certificate}"):
                asyncio.run(register(certificate, role))
    finally:
        master.stop()


def test_without_the_extra_it_says_what_to_install(tmp_path):
    code = "import sys; sys.modules['cryptography'] = None\nfrom tanghulu.cli.main import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", code, "certs", "init", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert "certs]" in done.stderr
