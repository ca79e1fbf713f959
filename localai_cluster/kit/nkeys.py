"""NATS keys and the tokens that they sign (`contract/nats.md` §9.2).

A key is an Ed25519 pair written as text: base32 of a prefix for its role, the bytes, and a checksum. `O…` is
an operator, `A…` an account, `U…` a user; a seed begins with `S` and the role's letter. A token is a JWT of
version 2 whose algorithm is `ed25519-nkey`. The NATS server verifies everything; this module only signs.
"""

import base64
import binascii
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

Role = Literal["operator", "account", "user"]

_PREFIX_BY_ROLE: dict[Role, int] = {"operator": 14 << 3, "account": 0, "user": 20 << 3}
_SEED_PREFIX = 18 << 3
MAX_TOKEN_LENGTH = 64 * 1024
MAX_ACCOUNT_TOKEN_LENGTH = 4 * 1024 * 1024
"""Maximum characters of an account's token, which holds the revocations.

A NATS server accepts even fewer.
"""


@dataclass(frozen=True)
class KeyPair:
    """One key pair; `seed` is the secret."""

    role: Role
    public_key: str
    seed: str = field(repr=False)

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, 64 bytes."""
        return _private_key(_decode_seed(self.seed)[1]).sign(data)


def generate(role: Role) -> KeyPair:
    """Generate a key pair."""
    return _key_pair_of(role, os.urandom(32))


def from_seed(seed: str, role: Role) -> KeyPair:
    """Return the key pair of a seed. Raise ValueError if the seed is invalid or of another role."""
    actual, raw = _decode_seed(seed)
    if actual != role:
        raise ValueError(f"a seed of the role {actual}, not {role}")
    return _key_pair_of(role, raw)


def derive(parent: KeyPair, role: Role, purpose: str) -> KeyPair:
    """Derive a key pair of `role` from `parent`. The same parent and purpose always give the same pair."""
    message = f"localai-cluster {role} {purpose}".encode()
    return _key_pair_of(role, hmac.digest(_decode_seed(parent.seed)[1], message, "sha256"))


def sign_token(claims: Mapping[str, Any], issuer: KeyPair) -> str:
    """Sign these claims as a JWT of `issuer`; add the claims `iss` and `jti`."""
    body = {**claims, "iss": issuer.public_key}
    digest = hashlib.new("sha512_256", _encode_json(body)).digest()
    body["jti"] = base64.b32encode(digest).decode().rstrip("=")
    text = (
        f"{_base64url(_encode_json({'typ': 'JWT', 'alg': 'ed25519-nkey'}))}.{_base64url(_encode_json(body))}"
    )
    return f"{text}.{_base64url(issuer.sign(text.encode()))}"


def claims_of(token: str, longest: int = MAX_TOKEN_LENGTH) -> dict[str, Any]:
    """Return the claims of a JWT without verifying the signature.

    Pass only our own tokens. Raise ValueError if the text is not a JWT or is longer than `longest`.
    """
    parts = token.strip().split(".")
    if len(parts) != 3 or len(token) > longest:
        raise ValueError("not a JWT")
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        raise ValueError("not a JWT") from None
    if not isinstance(claims, dict):
        raise ValueError("not a JWT")
    return claims


def _key_pair_of(role: Role, raw: bytes) -> KeyPair:
    prefix = _PREFIX_BY_ROLE[role]
    public = _private_key(raw).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    seed_prefix = bytes([_SEED_PREFIX | prefix >> 5, (prefix & 31) << 3])
    return KeyPair(role, _encode_key(bytes([prefix]) + public), _encode_key(seed_prefix + raw))


def _private_key(raw: bytes) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(raw)


def _decode_seed(seed: str) -> tuple[Role, bytes]:
    try:
        data = base64.b32decode(seed + "=" * (-len(seed) % 8))
    except (ValueError, binascii.Error):
        raise ValueError("not an NKEY seed") from None
    if len(data) != 36 or _checksum(data[:-2]) != data[-2:] or data[0] & 0xF8 != _SEED_PREFIX:
        raise ValueError("not an NKEY seed")
    prefix = (data[0] & 7) << 5 | data[1] >> 3
    role = next((role for role, role_prefix in _PREFIX_BY_ROLE.items() if role_prefix == prefix), None)
    if role is None:
        raise ValueError("not the seed of an operator, an account or a user")
    return role, data[2:-2]


def _encode_key(data: bytes) -> str:
    return base64.b32encode(data + _checksum(data)).decode().rstrip("=")


def _checksum(data: bytes) -> bytes:
    return binascii.crc_hqx(data, 0).to_bytes(2, "little")


def _encode_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def group_characters(fingerprint: str) -> str:
    """Return a fingerprint in groups of four characters, for people who read it aloud."""
    return " ".join(fingerprint[at : at + 4] for at in range(0, len(fingerprint), 4))
