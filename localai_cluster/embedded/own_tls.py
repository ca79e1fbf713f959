"""HTTPS of `make run`: the name that the operator's certificate is for, and how our own probes trust it."""

import ssl
from pathlib import Path

from cryptography import x509

from localai_cluster import join_script
from localai_cluster.embedded.resources import SetupError


def trusting(certificate: Path) -> ssl.SSLContext:
    """Return a context that accepts this very certificate, under any name: for probes on this machine."""
    context = ssl.create_default_context(cafile=str(certificate))
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def certified_host(certificate: Path, preferred: str) -> str:
    """Return `preferred` if the certificate is for it, else another host of this machine that it is for.

    `SetupError` if it names none.
    """
    names = _names(certificate)
    for host in (preferred, "localhost", *names):
        if host in names:
            return host
    raise SetupError(
        f"CLUSTER_TLS_CERT: {certificate} names no host.",
        "Use a certificate with a subject alternative name.",
    )


def public_host(certificate: Path, preferred: str) -> str:
    """Return `preferred` if the certificate is for it, else a name in it that other machines may know."""
    names = _names(certificate)
    others = (name for name in names if not join_script.is_loopback(name))
    return preferred if preferred in names else next(others, preferred)


def is_self_signed(certificate: Path) -> bool:
    """Return True if the certificate is its own authority."""
    found = _read(certificate)
    return found.issuer == found.subject


def _names(certificate: Path) -> list[str]:
    try:
        names = _read(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    hosts = [*names.get_values_for_type(x509.DNSName), *addresses]
    return [host for host in hosts if not host.startswith("*")]


def _read(certificate: Path) -> x509.Certificate:
    # The settings have been checked: it can be read and holds a certificate.
    return x509.load_pem_x509_certificates(certificate.read_bytes())[0]
