"""Strict JSON request bodies: any body results in a value or in one 400, never in a 500."""

import json
from collections.abc import Iterable, Mapping
from typing import IO, Any, NoReturn

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from rest_framework import serializers
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from localai_cluster.kit import errors, untrusted

MALFORMED = "invalid request body"


def parse_json(raw: bytes) -> Any:
    """Return the JSON value of `raw`; an empty body is an empty object (§0.1). Raises InvalidInput."""
    if not raw.strip():
        return {}
    if problem := untrusted.json_problem(raw):
        raise errors.InvalidInput(f"the request body is {problem}")
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise errors.InvalidInput(MALFORMED) from error


def parse_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of `raw`; raise InvalidInput for any other value."""
    value = parse_json(raw)
    if not isinstance(value, dict):
        raise errors.InvalidInput(MALFORMED)
    return value


def is_json(content_type: str) -> bool:
    """Return True if a Content-Type header announces JSON, or if it is absent."""
    return content_type.split(";", 1)[0].strip().lower() in ("", "application/json")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


class StrictJSONParser(BaseParser):
    """Parser of UTF-8 JSON; the character set that the client announces is ignored."""

    media_type = "application/json"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the body's value; raise RequestDataTooBig above the limit, which a stream does not check."""
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise RequestDataTooBig
        return parse_json(raw)


class AlwaysJSON(BaseContentNegotiation):
    """Negotiation with one representation: the Accept header is ignored."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser | None:
        """Return the JSON parser; None if another content type is announced."""
        return next(iter(parsers)) if is_json(request.content_type or "") else None

    def select_renderer(
        self, request: Request, renderers: Iterable[BaseRenderer], format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        """Return the JSON renderer."""
        renderer = next(iter(renderers))
        return renderer, renderer.media_type


def validated(shape: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    """Return the body's fields. InvalidInput unless it is an object, ValidationError for wrong fields."""
    if not isinstance(request.data, dict):
        raise errors.InvalidInput(MALFORMED)
    serializer = shape(data=request.data)
    serializer.is_valid(raise_exception=True)
    fields: dict[str, Any] = serializer.validated_data
    return fields
