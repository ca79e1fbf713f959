"""Access to registries: their addresses and credentials.

Credentials come from the setting LOCALAI_REGISTRIES, and from a `config.json` as Docker writes it. A
credential goes to its registry's own host, and to a token service over HTTPS on that host or named in the
setting. Credential helpers are programs of their own and are refused with a message.
"""

import base64
import binascii
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from localai_cluster.kit import untrusted
from localai_cluster.kit.env import RegistrySetting
from localai_cluster.kit.outbound import SourceError
from localai_cluster.registries.references import DOCKER_HUB

_MAX_CONFIG_BYTES = 1024 * 1024
_DOCKER_HUB_KEYS = ("index.docker.io", "registry-1.docker.io", DOCKER_HUB)
_DOCKER_HUB_TOKEN_URL = "https://auth.docker.io/token"
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Credential:
    """A user's name and password."""

    username: str
    password: str = field(repr=False)

    @property
    def header(self) -> str:
        """Value of the header `Authorization`."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


def default_config() -> Path:
    """Return the path of Docker's `config.json`, which Podman can use too (`--authfile`)."""
    folder = os.environ.get("DOCKER_CONFIG") or Path(os.environ.get("HOME") or "/", ".docker")
    return Path(folder, "config.json")


class Access:
    """Credentials and addresses of registries. The file `config` is read at every use."""

    def __init__(self, settings: Sequence[RegistrySetting] = (), config: Path | None = None) -> None:
        self._settings = {setting.host.lower(): setting for setting in settings}
        self._config = config

    def base_url(self, host: str) -> str:
        """Return the registry's URL: HTTPS, unless it is on this machine or configured as plain HTTP."""
        setting = self._settings.get(host)
        is_plain = setting.plain_http if setting else None
        if is_plain is None:
            is_plain = host in _LOOPBACK_HOSTS or host.rpartition(":")[0] in _LOOPBACK_HOSTS
        return f"{'http' if is_plain else 'https'}://{'registry-1.docker.io' if host == DOCKER_HUB else host}"

    def may_authenticate_at(self, host: str, realm: str) -> bool:
        """Return True if the token service `realm` may receive this registry's credential."""
        setting = self._settings.get(host)
        named = [setting.realm] if setting and setting.realm else []
        if host == DOCKER_HUB:
            named.append(_DOCKER_HUB_TOKEN_URL)
        own = urlsplit(self.base_url(host)).netloc
        try:
            parts = urlsplit(realm)
        except ValueError:
            return False
        return realm in named or (parts.scheme == "https" and parts.netloc.lower() == own)

    def credential(self, host: str) -> Credential | None:
        """Return the credential for a registry, None if there is none. Raise SourceError. Blocks."""
        setting = self._settings.get(host)
        if setting and setting.username:
            return Credential(setting.username, setting.password)
        return self._credential_from_config(host)

    def _credential_from_config(self, host: str) -> Credential | None:
        config = self._read_config()
        auths = _mapping_or_empty(config.get("auths"))
        names = _DOCKER_HUB_KEYS if host == DOCKER_HUB else (host,)
        helpers = {_host_of(name) for name in _mapping_or_empty(config.get("credHelpers"))}
        entry = next((_mapping_or_empty(auths[name]) for name in auths if _host_of(name) in names), None)
        if helpers & set(names) or (entry is not None and not entry and config.get("credsStore")):
            raise SourceError(
                f"{self._config} names a credential helper for {host}, and helpers are not run. Put the"
                " credential into LOCALAI_REGISTRIES, or into auths of that file."
            )
        return _credential_of(entry, host, str(self._config)) if entry else None

    def _read_config(self) -> Mapping[str, Any]:
        if self._config is None:
            return {}
        try:
            text = untrusted.read_file(self._config, _MAX_CONFIG_BYTES)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise SourceError(f"cannot read {self._config}: {error.strerror}") from error
        try:
            if len(text) > _MAX_CONFIG_BYTES or untrusted.json_problem(text):
                raise ValueError
            return _mapping_or_empty(msgspec.json.decode(text))
        except ValueError:
            raise SourceError(f"{self._config} is not JSON as Docker writes it") from None


def _credential_of(entry: Mapping[str, Any], host: str, config: str) -> Credential:
    username, password, encoded = (entry.get(key) for key in ("username", "password", "auth"))
    if isinstance(encoded, str) and encoded:
        try:
            username, _, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            raise SourceError(f"{config}: the auth of {host} is not base64") from None
    if isinstance(username, str) and username and isinstance(password, str):
        return Credential(username, password)
    raise SourceError(f"{config} has no user name and password for {host}: only these are supported")


def _mapping_or_empty(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _host_of(name: str) -> str:
    """Return the host in a key of `auths`; the key may be a URL."""
    return (
        name.partition("://")[2].partition("/")[0].lower()
        if "://" in name
        else name.partition("/")[0].lower()
    )
