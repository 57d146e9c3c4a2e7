# SPDX-License-Identifier: Apache-2.0
"""Certificates that the configuration names: time, key, CA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from twinpool.config import TlsConfig, TwinpoolConfig
from twinpool.control.doctor.finding import Finding, failed, ok, warning

SOON: Final = timedelta(days=7)
"""A certificate that ends so soon should have been renewed."""

_MATTERS: Final = "connections with it are refused"


@dataclass(frozen=True, slots=True)
class Files:
    """The keys of the configuration that name them, and the paths."""

    name: str
    cert_file: str
    key_file: str
    ca_file: str


def files_of(config: TwinpoolConfig) -> list[Files]:
    """All sets of files that are named."""
    sets = [
        Files("tls", config.tls.cert_file, config.tls.key_file, config.tls.ca_file),
        Files("client", config.client.cert_file, config.client.key_file, config.client.ca_file),
        Files(
            "cluster.etcd",
            config.cluster.etcd_cert_file,
            config.cluster.etcd_key_file,
            config.cluster.etcd_ca_file,
        ),
    ]
    return [one for one in sets if one.cert_file or one.ca_file]


def check_certificates(config: TwinpoolConfig, now: Callable[[], datetime] | None = None) -> list[Finding]:
    """A finding a set of files, the first thing that is wrong with it. Without any: none."""
    moment = now() if now is not None else datetime.now(UTC)
    return [check_files(files, moment) for files in files_of(config)]


def refusal(tls: TlsConfig | None) -> str:
    """What is wrong with the files that were shown to a server; "" for nothing that they tell."""
    if tls is None or not tls.cert_file:
        return ""
    found = check_files(Files("client", tls.cert_file, tls.key_file, tls.ca_file), datetime.now(UTC))
    return found.detail if found.status.value == "failed" else ""


def check_files(files: Files, now: datetime) -> Finding:
    """The certificate is valid now, fits its key and was signed by the CA."""
    name = f"certificate {files.name}"
    try:
        roots = _read(files.ca_file) if files.ca_file else []
        chain = _read(files.cert_file) if files.cert_file else []
        fault = _fault(files, chain, roots, now)
    except OSError as error:
        return failed(
            name, f"{error.filename}: {error.strerror}", _MATTERS, "let the user of the process read it"
        )
    except (ValueError, UnsupportedAlgorithm) as error:
        return failed(name, str(error), _MATTERS, "write the files anew, as PEM")
    if fault is not None:
        return failed(name, fault[0], _MATTERS, fault[1])
    last = min(one.not_valid_after_utc for one in (*chain, *roots))
    detail = f"valid until {last:%Y-%m-%d %H:%M} UTC"
    if last - now < SOON:
        days = (last - now) / timedelta(days=1)
        return warning(
            name,
            f"{detail}, for {days:.1f} days",
            _MATTERS + " then",
            "renew it; processes take new files by themselves",
        )
    return ok(name, detail)


def _fault(
    files: Files, chain: list[x509.Certificate], roots: list[x509.Certificate], now: datetime
) -> tuple[str, str] | None:
    """What is wrong, and the remedy."""
    for path, one in [(files.cert_file, each) for each in chain] + [(files.ca_file, each) for each in roots]:
        subject = one.subject.rfc4514_string() or "no subject"
        if now > one.not_valid_after_utc:
            return f"{path} ({subject}) expired at {one.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", "renew it"
        if now < one.not_valid_before_utc:
            begins = f"{one.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
            return (
                f"{path} ({subject}) is not valid before {begins}",
                "set this machine's clock, or issue it anew",
            )
    if not chain:
        return None
    key = load_pem_private_key(Path(files.key_file).read_bytes(), None).public_key()
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        return (
            f"{files.key_file} is not the key of {files.cert_file}",
            "give the pair that was issued together",
        )
    if roots and not _signed(chain, roots):
        issuer = chain[-1].issuer.rfc4514_string()
        return (
            f"{files.cert_file} was signed by {issuer!r}, which is not in {files.ca_file}",
            "give the CA that signed it, or have it signed by that CA",
        )
    return None


def _signed(chain: list[x509.Certificate], roots: list[x509.Certificate]) -> bool:
    """Whether the chain leads to a root."""
    current = chain[0]
    for _ in range(len(chain) + 1):
        if any(_issued(current, root) for root in roots):
            return True
        above = next((one for one in chain[1:] if one != current and _issued(current, one)), None)
        if above is None:
            return False
        current = above
    return False


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _read(path: str) -> list[x509.Certificate]:
    """Raises OSError, or ValueError that names the file."""
    try:
        return x509.load_pem_x509_certificates(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no certificate: {error}") from None
