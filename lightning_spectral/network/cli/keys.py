"""Certificates for TLS and keys for nodes, made on the spot, for networks on one machine."""

from __future__ import annotations

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

VALID = timedelta(days=30)


def write_certificates(folder: Path, address: str = "127.0.0.1") -> None:
    """Write ``ca.crt``, and ``server.pem`` with its key ``server.key``, for one address.

    The key of the authority is not kept, so it can sign nothing else.
    """
    authority, own = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = _certificate("lightning_spectral", authority, "lightning_spectral", authority, is_authority=True)
    names = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    server = _certificate("server", own, "lightning_spectral", authority, names=names)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.pem", server.public_bytes(serialization.Encoding.PEM))
    _write(folder / "server.key", _private(own, serialization.PrivateFormat.PKCS8))


def write_node_key(folder: Path, name: str) -> Path:
    """Write the private key of a node, and its public key beside it as ``NAME.pub``; return the private one's path."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / name, _private(key, serialization.PrivateFormat.OpenSSH))
    _write(folder / f"{name}.pub", public)
    return folder / name


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    issuing: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool = False,
    names: list[x509.GeneralName] | None = None,
) -> x509.Certificate:
    now = datetime.now(timezone.utc)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + VALID)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuing.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(issuing, hashes.SHA256())


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    data: bytes = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    return data


def _write(path: Path, data: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(data)
