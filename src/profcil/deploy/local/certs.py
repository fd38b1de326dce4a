"""Certificates and keys for tests: a certificate authority, a server certificate and a key for every node.

For production, use certificates from your organisation's certificate authority. The files and flags are the same.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from profcil.errors import ConfigError

VALID_DAYS = 365
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def write_certs(folder: Path, hosts: Sequence[str] = (), nodes: int = 1) -> list[Path]:
    """Writes ca.crt, ca.key, server.crt, server.key, and node-N with node-N.pub. Only their owner can read keys."""
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = Path(folder)
    if (folder / "ca.key").exists():
        raise ConfigError(f"{folder} already has a certificate authority; use its files, or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key = ec.generate_private_key(ec.SECP384R1())
    server_key = ec.generate_private_key(ec.SECP384R1())
    ca = make_certificate("profcil test authority", ca_key, None, None, [])
    server = make_certificate("profcil test server", server_key, ca, ca_key, [*LOCAL_HOSTS, *hosts])
    files = {
        "ca.key": private_pem(ca_key),
        "ca.crt": certificate_pem(ca),
        "server.key": private_pem(server_key),
        "server.crt": certificate_pem(server),
    }
    for i in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files |= {f"node-{i}": private_openssh(key), f"node-{i}.pub": public_openssh(key)}
    return write_all({folder / name: data for name, data in files.items()})


def write_all(files: Mapping[Path, bytes]) -> list[Path]:
    """Writes all files or none: an incomplete set is useless, and would block the next attempt."""
    written: list[Path] = []
    for path, data in files.items():
        write = write_public if path.suffix in (".crt", ".pub") else write_secret
        try:
            write(path, data)
        except OSError as error:
            # A file that existed before is not ours to remove.
            partial = [] if isinstance(error, FileExistsError) else [path]
            for file in [*written, *partial]:
                file.unlink(missing_ok=True)
            error.filename = str(path)  # the error of a full disk names no file
            raise
        written.append(path)
    return written


def make_certificate(name: str, key: Any, issuer: Any, issuer_key: Any, hosts: Sequence[str]) -> Any:
    """A certificate for some hosts, signed by an issuer. Without an issuer: a self-signed authority."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    signer = issuer_key or key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(key_usage(issuer is None), critical=True)
    )
    if hosts:
        builder = builder.add_extension(x509.SubjectAlternativeName([host_name(h) for h in hosts]), critical=False)
    return builder.sign(signer, hashes.SHA384())


def key_usage(authority: bool) -> Any:
    """All keys may sign data. Only an authority's key may sign certificates."""
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def host_name(host: str) -> Any:
    """An IP address or a DNS name."""
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def private_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def certificate_pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return certificate.public_bytes(s.Encoding.PEM)


def private_openssh(key: Any) -> bytes:
    """A node's key in OpenSSH's format, which Flower reads."""
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())


def public_openssh(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)


def write_secret(path: Path, data: bytes) -> None:
    """Writes a new file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def write_public(path: Path, data: bytes) -> None:
    path.write_bytes(data)
