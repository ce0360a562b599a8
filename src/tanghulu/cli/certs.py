"""``tanghulu certs init``: a small authority, and certificates for the processes of one cluster.

For clusters without an authority of their own. Each certificate names its hosts and its role, so that none can pass for
another; keys are P-256 and readable by their owner only. Nothing is overwritten: a second run makes only what is
missing. There are no revocation lists, so certificates are valid for 397 days at most.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tanghulu.auth.certificate_roles import AUTHORITY, CLIENT, NODE, ROLES, URI, name_for
from tanghulu.cli.printing import write_private
from tanghulu.errors import ConfigError
from tanghulu.runtime import extras

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

_AUTHORITY = "ca"
_AUTHORITY_DAYS = 3650
#: The maximum and the default validity of a certificate.
MOST_DAYS, DAYS = 397, 365
ANY_HOST = "*"
HOST_HELP = "name or address that the certificates are valid for; '*' means any, for cluster processes only; repeatable"
#: Clocks of other hosts may be behind.
_EARLIER = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Signer:
    """An authority: its certificate and key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, hosts: tuple[str, ...], days: int) -> list[Path]:
    """Make the authority and a certificate for each role, for ``hosts``; returns the files made.

    Raises ConfigError for an invalid host, a ``folder`` that cannot be written, or half or a malformed authority in it.
    """
    extras.require("certs", "tanghulu certs")
    for host in hosts:
        _alternative(host)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made: list[Path] = []
        signer = _authority(folder, made)
        for role in ROLES:
            if not (folder / f"{role}.pem").exists():
                _signed(folder, role, hosts, days, signer, made)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror or error}") from error
    return made


def hold_for(folder: Path, hosts: tuple[str, ...]) -> bool:
    """Return whether the certificates in ``folder`` are for all of ``hosts``."""
    extras.require("certs", "tanghulu certs")
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate((folder / f"{NODE}.pem").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    return {name_for(host, NODE) for host in hosts} <= set(names.get_values_for_type(x509.DNSName))


def _authority(folder: Path, made: list[Path]) -> Signer:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    certificate, key_file = folder / f"{_AUTHORITY}.pem", folder / f"{_AUTHORITY}.key"
    if certificate.exists() != key_file.exists():
        raise ConfigError(
            f"{folder} has only one of {_AUTHORITY}.pem and {_AUTHORITY}.key; restore the other "
            "one, or choose another folder"
        )
    if certificate.exists():
        try:
            loaded = load_pem_private_key(key_file.read_bytes(), None)
            signing = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password
            raise ConfigError(
                f"cannot read {certificate} and {key_file}: {error}; restore them, or choose another folder"
            ) from None
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                f"{key_file} is not an elliptic-curve key, so it was not made here; choose another folder"
            )
        return Signer(signing, loaded)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _begun("tanghulu authority", key, _AUTHORITY_DAYS).issuer_name(_name("tanghulu authority"))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = {"key_cert_sign": True, "crl_sign": True}
    builder = builder.add_extension(_usage(**usage), critical=True)
    builder = builder.add_extension(x509.SubjectAlternativeName([_role(AUTHORITY)]), critical=False)
    signer = Signer(_finished(builder, key, key), key)
    _write(folder, _AUTHORITY, signer.certificate, key, made)
    return signer


def _signed(folder: Path, role: str, hosts: tuple[str, ...], days: int, signer: Signer, made: list[Path]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    key = ec.generate_private_key(ec.SECP256R1())
    builder = _begun(role, key, days).issuer_name(signer.certificate.subject)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    named = [_alternative(host) for host in hosts if host != ANY_HOST]
    names = [_role(role), *named, *(x509.DNSName(name_for(host, role)) for host in hosts)]
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(_usage(digital_signature=True), critical=True)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role != CLIENT:
        purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
    builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    _write(folder, role, _finished(builder, key, signer.key), key, made)


def _begun(name: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(_name(name)).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _EARLIER).not_valid_after(now + timedelta(days=days))


def _finished(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signing: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    identifiers = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = builder.add_extension(identifiers, critical=False).add_extension(signer, critical=False)
    return builder.sign(signing, hashes.SHA256())


def _usage(**wanted: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    names += " key_cert_sign crl_sign encipher_only decipher_only"
    return x509.KeyUsage(**{name: wanted.get(name, False) for name in names.split()})


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _role(role: str) -> x509.GeneralName:
    from cryptography import x509

    return x509.UniformResourceIdentifier(URI + role)


def _alternative(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if host.isascii():
            return x509.DNSName(host)
    raise ConfigError(f"--host {host!r} is neither an address nor an ASCII name; write its xn--... form")


def _write(
    folder: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey, made: list[Path]
) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # The key first: an existing certificate then implies an existing key.
    for path, data, mode in (
        (folder / f"{name}.key", secret, 0o600),
        (folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM), 0o644),
    ):
        write_private(path, data, mode)
        made.append(path)


@click.group("certs", help="Make certificates for the processes of a cluster.")
def COMMAND() -> None:
    """The command group; its command follows."""


@COMMAND.command("init", short_help="Make an authority and a certificate for each role.")
@click.argument("folder", type=click.Path(path_type=Path), default=Path("certs"))
@click.option("--host", "hosts", multiple=True, help=HOST_HELP)
@click.option("--days", type=click.IntRange(1, MOST_DAYS), default=DAYS, show_default=True, help="days of validity")
def init(folder: Path, hosts: tuple[str, ...], days: int) -> None:
    """Make an authority and certificates for all roles in FOLDER; existing files are kept."""
    named = tuple(dict.fromkeys((*hosts, "localhost", "127.0.0.1")))
    made = make(folder, named, days)
    click.echo(f"{folder}: {', '.join(path.name for path in made) if made else 'all is there already'}")
    click.echo(f"for {', '.join(named)}; keep {_AUTHORITY}.key apart: who has it can sign for anybody\n")
    click.echo(f"  tanghulu master --tls-cert {folder}/master.pem --tls-key {folder}/master.key", nl=False)
    click.echo(f" --tls-ca {folder}/{_AUTHORITY}.pem --tls-mutual")
    click.echo(f"  tanghulu store nodes --tls-ca {folder}/{_AUTHORITY}.pem", nl=False)
    click.echo(f" --tls-cert {folder}/client.pem --tls-key {folder}/client.key")
