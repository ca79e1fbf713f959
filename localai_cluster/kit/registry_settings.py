"""The setting LOCALAI_REGISTRIES, which the worker and the server processes share."""

from urllib.parse import urlsplit

import msgspec

REGISTRIES_EXAMPLE = '[{"host": "registry.example", "username": "reader", "password": "…"}]'
_WANTED = 'not a JSON list of {"host": …, "username": …, "password": …, "realm": …, "plain_http": …}'


class RegistrySetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One registry of LOCALAI_REGISTRIES."""

    host: str
    username: str = ""
    password: str = ""
    realm: str = ""
    """URL of the token service that may get the credential, if it is not on the registry's host."""
    plain_http: bool | None = None

    def __repr__(self) -> str:
        return f"RegistrySetting({self.host!r})"


def parse_registries(text: str) -> tuple[RegistrySetting, ...]:
    """Parse LOCALAI_REGISTRIES. Raise ValueError, which never quotes the text."""
    try:
        settings = msgspec.json.decode(text.encode("utf-8", "replace"), type=tuple[RegistrySetting, ...])
    except (msgspec.DecodeError, RecursionError):
        raise ValueError(_WANTED) from None
    for setting in settings:
        if "/" in setting.host or not setting.host:
            raise ValueError("not a list of hosts: a host has the form registry.example:5000")
        if setting.realm and urlsplit(setting.realm).scheme not in ("http", "https"):
            raise ValueError(f"wrong: the realm of {setting.host} is not an http:// or https:// URL")
    return settings
