"""What requests for commands on backends say: names, addresses, galleries; checked here for all routes."""

import logging
import re
from typing import Any
from urllib.parse import urlsplit

from rest_framework import serializers

from localai_cluster.kit import errors
from localai_cluster.web.fields import Described, NullIsAbsent, Text
from localai_cluster.web.parsers import parse_json
from nodes.backends import node_commands
from nodes.backends.backend_requests import INSTALL, Wish
from nodes.backends.installed import is_image

log = logging.getLogger(__name__)

BACKEND_NAME = r"(?:[A-Za-z0-9][A-Za-z0-9._-]*@)?[A-Za-z0-9][A-Za-z0-9._-]*"


def _text(length: int) -> Text:
    return Text(required=False, allow_null=True, max_length=length)


class InstallSerializer(Described, NullIsAbsent):
    """What to install on a node (§2.10)."""

    backend = _text(255)
    uri = _text(1024)
    name = _text(255)
    alias = _text(255)
    backend_galleries = _text(64 * 1024)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of names, and that one of three must be there."""
        for name in ("backend", "name", "alias"):
            schema["properties"][name]["pattern"] = f"^({BACKEND_NAME})?$"
        return schema | {"anyOf": [{"required": [name]} for name in ("backend", "name", "uri")]}

    def validate_backend(self, value: str | None) -> str | None:
        """A gallery's name, with an optional `gallery@` before it."""
        return checked_name(value)

    validate_name = validate_backend
    validate_alias = validate_backend

    def validate_uri(self, value: str | None) -> str | None:
        """An address without control characters, and without a password: operations show it."""
        if value and not value.isprintable():
            raise serializers.ValidationError("must not contain control characters")
        if value and "@" in _authority(value):
            raise serializers.ValidationError("must not contain a user or password")
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """An image has no name of its own (`contract/worker.md` §18.5)."""
        if is_image(attrs.get("uri") or "") and not (attrs.get("name") or attrs.get("backend")):
            raise serializers.ValidationError({"name": ["must be given with the address of an image"]})
        return attrs

    def validate_backend_galleries(self, value: str | None) -> str:
        """O37: anything but a list with galleries in it means the configured ones."""
        if not value:
            return ""
        try:
            galleries = parse_json(value.encode())
        except errors.InvalidInput:
            galleries = None
        if not isinstance(galleries, list):
            log.warning("backend_galleries is ignored, because it is not a list")  # it may hold passwords
        return value if isinstance(galleries, list) and galleries else ""


def _authority(uri: str) -> str:
    try:
        return urlsplit(uri).netloc
    except ValueError:
        raise serializers.ValidationError("must be an address") from None


def checked_name(value: str | None) -> str | None:
    if value and not re.fullmatch(BACKEND_NAME, value, re.ASCII):
        raise serializers.ValidationError(
            "must be letters, digits, dots, dashes and underscores, with an optional gallery@ before it"
        )
    return value


class BackendSerializer(Described, serializers.Serializer[Any]):
    """Which installed backend (§2.10)."""

    backend = Text(max_length=255)

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """With the form of names."""
        schema["properties"]["backend"] |= {"pattern": f"^{BACKEND_NAME}$", "minLength": 1}
        return schema

    def validate_backend(self, value: str) -> str:
        """The name as the worker lists it: a gallery before it says only where it came from."""
        if not value:
            raise serializers.ValidationError("must not be empty")
        return (checked_name(value) or "").rpartition("@")[2]


def install_wish(fields: dict[str, Any], *, force: bool = False) -> Wish:
    """What an install asks for. Raises InvalidInput without a name or an address.

    Without a name the address stands for it (A22).
    """
    asked, name, uri = fields.get("backend", ""), fields.get("name", ""), fields.get("uri", "")
    gallery, _, backend = (asked or name).rpartition("@")
    if not (backend or uri):
        raise errors.InvalidInput("backend name or uri required", field="backend")
    return Wish(
        INSTALL,
        backend or node_commands.subject(uri),
        gallery=gallery,
        uri=uri,
        name=name,
        alias=fields.get("alias", ""),
        galleries=fields.get("backend_galleries", ""),
        force=force,
    )


def bare_name(text: str) -> str:
    """A backend's name from a path. Raises InvalidInput for what is none."""
    if not re.fullmatch(BACKEND_NAME, text, re.ASCII) or len(text) > 255:
        raise errors.InvalidInput("this is no name of a backend", field="name")
    return text.rpartition("@")[2]
