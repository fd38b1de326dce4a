"""Certificates and keys for a trial: an authority of one's own, a certificate of the server, a key for every node.

For more than a trial, take certificates from whoever issues them in your house; the files and flags are the same.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from profcil.errors import ConfigError

DAYS = 365
ALWAYS = ("localhost", "127.0.0.1", "::1")


def write_certs(folder: Path, hosts: Sequence[str] = (), nodes: int = 1) -> list[Path]:
    """ca.crt, server.crt, server.key, and node-N with node-N.pub; keys can be read by their owner alone."""
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = Path(folder)
    if (folder / "ca.key").exists():
        raise ConfigError(f"{folder} holds an authority already; use its files, or choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    ca = certificate("profcil trial authority", ca_key, None, None, [])
    server = certificate("profcil trial server", server_key, ca, ca_key, [*ALWAYS, *hosts])
    files = {"ca.key": pem(ca_key), "ca.crt": pem_of(ca), "server.key": pem(server_key), "server.crt": pem_of(server)}
    for i in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files |= {f"node-{i}": ssh(key), f"node-{i}.pub": ssh_public(key)}
    return write_all({folder / name: data for name, data in files.items()})


def write_all(files: Mapping[Path, bytes]) -> list[Path]:
    """All of them or none: an authority whose files are not all there is of no use, and would be in the way."""
    made: list[Path] = []
    for path, data in files.items():
        try:
            (write_public if path.suffix in (".crt", ".pub") else write_secret)(path, data)
        except OSError as error:
            for one in made if isinstance(error, FileExistsError) else [*made, path]:
                one.unlink(missing_ok=True)
            error.filename = str(path)  # a full disk names no file
            raise
        made.append(path)
    return made


def certificate(name: str, key: Any, issuer: Any, issuer_key: Any, hosts: Sequence[str]) -> Any:
    """An authority's own certificate, or one it has issued for some hosts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, signer = datetime.now(UTC), issuer_key or key
    made = (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(issuer.subject if issuer else own)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(usage(issuer is None), critical=True)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([named(h) for h in hosts]), critical=False)
    return made.sign(signer, hashes.SHA384())


def usage(authority: bool) -> Any:
    from cryptography import x509

    no = {"content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"}
    rights = dict.fromkeys([*no, "decipher_only"], False)
    return x509.KeyUsage(digital_signature=True, key_cert_sign=authority, crl_sign=authority, **rights)


def named(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def pem_of(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return certificate.public_bytes(s.Encoding.PEM)


def ssh(key: Any) -> bytes:
    """Flower reads node keys in OpenSSH's own form."""
    from cryptography.hazmat.primitives import serialization as s

    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.OpenSSH, s.NoEncryption())


def ssh_public(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization as s

    return key.public_key().public_bytes(s.Encoding.OpenSSH, s.PublicFormat.OpenSSH)


def write_secret(path: Path, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def write_public(path: Path, data: bytes) -> None:
    path.write_bytes(data)
