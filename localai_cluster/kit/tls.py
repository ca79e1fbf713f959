"""TLS contexts for client connections, and checks of the servers' certificate files.

All files are loaded at the start, so a wrong file is reported as a wrong setting and does not break a
connection later. Our contexts always verify the peer and its name.
"""

import ssl
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cryptography import x509

_KEY_MISMATCH_REASON = "KEY_VALUES_MISMATCH"


class WrongTlsFile(ValueError):
    """A TLS file cannot be used; `part` is `CA`, `CERT` or `KEY`."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


@dataclass(frozen=True)
class TlsFiles:
    """Names of PEM files. `ca` verifies the peer; `certificate` and `key` authenticate this process.

    An empty name stands for no file. Without `ca`, the system's CAs verify the peer.
    """

    ca: str = ""
    certificate: str = ""
    key: str = ""

    def __bool__(self) -> bool:
        return bool(self.ca or self.certificate or self.key)

    def client(self, now: datetime) -> ssl.SSLContext:
        """Return a TLS context for outgoing connections; raise WrongTlsFile if a file cannot be used."""
        self._check_files(now)
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
        except ssl.SSLError:
            raise WrongTlsFile("CA", f"{self.ca} holds no CA certificate in PEM form") from None
        if self.certificate:
            self._load_own_certificate(context)
        return context

    def server(self, now: datetime) -> None:
        """Check the files for a server. Raise WrongTlsFile if a file is missing or cannot be used."""
        self._check_files(now)
        if not self.certificate:
            raise WrongTlsFile("CERT", "is not set, although the key is")
        self._load_own_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def _load_own_certificate(self, context: ssl.SSLContext) -> None:
        try:
            # Without a password callback OpenSSL would prompt for an encrypted key's password and block.
            context.load_cert_chain(self.certificate, self.key, password=lambda: "")
        except ssl.SSLError as error:
            if error.reason == _KEY_MISMATCH_REASON:
                message = f"{self.key} is not the key of the certificate in {self.certificate}"
            else:
                message = (
                    f"{self.key} holds no usable private key in PEM form (encrypted keys are not supported)"
                )
            raise WrongTlsFile("KEY", message) from None

    def _check_files(self, now: datetime) -> None:
        if bool(self.certificate) != bool(self.key):
            raise WrongTlsFile("KEY" if self.certificate else "CERT", "is not set; set both or neither")
        for part, name in (("CA", self.ca), ("CERT", self.certificate), ("KEY", self.key)):
            if name:
                _read_file(part, name)
        if self.certificate:
            _check_certificate(self.certificate, now)


def _read_file(part: str, name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise WrongTlsFile(part, f"cannot read {name}: {error.strerror}") from None


def _check_certificate(name: str, now: datetime) -> None:
    try:
        certificate = x509.load_pem_x509_certificates(_read_file("CERT", name))[0]
    except (ValueError, IndexError):
        raise WrongTlsFile("CERT", f"{name} holds no certificate in PEM form") from None
    if certificate.not_valid_after_utc < now:
        raise WrongTlsFile(
            "CERT", f"the certificate in {name} expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
        )


def context_with_ca(ca: str) -> ssl.SSLContext | None:
    """Return a context that trusts the system's CAs and the CAs in the PEM file; None for no file.

    Raise ValueError if the file cannot be used.
    """
    if not ca:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError:
        raise ValueError("a file without a CA certificate in PEM form") from None
    except OSError as error:
        raise ValueError(f"not readable: {error.strerror}") from None
    return context
