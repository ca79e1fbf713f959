"""JSON of REST: strict parsing, strict serializer fields, and fast rendering.

Any body results in a value or in one 400, never in a 500. Null means absence where a serializer says so. Long
lists spend more time in the encoder than in the database, so responses are encoded by orjson.
"""

from collections.abc import Iterable, Mapping
from typing import IO, Any

import orjson
from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from rest_framework import serializers
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request

from localai_cluster.kit import errors
from localai_cluster.web.wire import MALFORMED_MESSAGE, is_json, parse_json


class StrictJSONParser(BaseParser):
    """DRF parser of UTF-8 JSON. It ignores the character set in the content type."""

    media_type = "application/json"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the JSON value of the body. Raise RequestDataTooBig above the limit.

        The limit is the view's `most_body_bytes`, else that of the settings. Django does not check the limit
        of a stream itself.
        """
        view = (parser_context or {}).get("view")
        limit = getattr(view, "most_body_bytes", settings.DATA_UPLOAD_MAX_MEMORY_SIZE)
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise RequestDataTooBig
        return parse_json(raw)


class AlwaysJSON(BaseContentNegotiation):
    """DRF content negotiation that ignores the Accept header and always responds with JSON."""

    def select_parser(self, request: Request, parsers: Iterable[BaseParser]) -> BaseParser | None:
        """Return the JSON parser, None if the request declares another content type."""
        return next(iter(parsers)) if is_json(request.content_type or "") else None

    def select_renderer(
        self, request: Request, renderers: Iterable[BaseRenderer], format_suffix: str | None = None
    ) -> tuple[BaseRenderer, str]:
        """Return the JSON renderer."""
        renderer = next(iter(renderers))
        return renderer, renderer.media_type


def validate_body(shape: type[serializers.Serializer[Any]], request: Request) -> dict[str, Any]:
    """Return the validated fields of the body.

    Raise InvalidInput unless the body is an object, ValidationError for wrong fields.
    """
    if not isinstance(request.data, dict):
        raise errors.InvalidInput(MALFORMED_MESSAGE)
    return validate(shape, request.data)


def validate(shape: type[serializers.Serializer[Any]], data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated fields. Raise ValidationError for wrong ones."""
    serializer = shape(data=data)
    serializer.is_valid(raise_exception=True)
    fields: dict[str, Any] = serializer.validated_data
    return fields


class FastJSONRenderer(BaseRenderer):
    """DRF renderer of plain values with orjson. Times in UTC end in `Z`, ids are texts."""

    media_type = "application/json"
    format = "json"
    charset = None
    render_style = "binary"

    def render(
        self,
        data: Any,
        accepted_media_type: str | None = None,
        renderer_context: Mapping[str, Any] | None = None,
    ) -> bytes:
        """Return the response body as JSON, empty for a response without data."""
        return b"" if data is None else orjson.dumps(data, option=orjson.OPT_UTC_Z)


class Strict:
    """Mixin for serializer fields that refuses values which DRF would convert.

    For example, a number is no text, and a text or a boolean is no number. The API document adds `schema` to
    the schema that it derives from the field.
    """

    accepted_type: type | tuple[type, ...]
    complaint: str

    def __init__(self, *, schema: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.schema = schema or {}
        super().__init__(**options)

    def to_internal_value(self, data: Any) -> Any:
        """Return the value if it has the right JSON type."""
        if not isinstance(data, self.accepted_type) or (
            isinstance(data, bool) and self.accepted_type is not bool
        ):
            raise serializers.ValidationError(self.complaint)
        return super().to_internal_value(data)  # type: ignore[misc]


class Text(Strict, serializers.CharField):
    """Serializer field of a JSON string, which is not trimmed."""

    accepted_type = str
    complaint = "must be a string"

    def __init__(self, *, max_length: int, **options: Any) -> None:
        super().__init__(max_length=max_length, trim_whitespace=False, allow_blank=True, **options)


class Whole(Strict, serializers.IntegerField):
    """Serializer field of a whole number."""

    accepted_type = int
    complaint = "must be a whole number"


class Number(Strict, serializers.FloatField):
    """Serializer field of a number."""

    accepted_type = (int, float)
    complaint = "must be a number"

    def to_internal_value(self, data: Any) -> Any:
        """Return the number if it fits in a float."""
        try:
            return super().to_internal_value(data)
        except OverflowError:
            raise serializers.ValidationError("is too large") from None


class Flag(Strict, serializers.BooleanField):
    """Serializer field of a boolean."""

    accepted_type = bool
    complaint = "must be true or false"


class NullIsAbsent(serializers.Serializer[Any]):
    """Mixin for serializers for which null means that an optional field is absent."""

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:
        fields: dict[str, serializers.Field[Any, Any, Any, Any]] = super().get_fields()
        for field in fields.values():
            field.allow_null = field.allow_null or not field.required
        return fields

    def to_internal_value(self, data: Any) -> Any:
        """Return the fields that are not null."""
        values: dict[str, Any] = super().to_internal_value(data)
        return {name: value for name, value in values.items() if value is not None}


class Described:
    """Mixin for serializers that corrects the derived schema in the API document."""

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the corrected schema of the serializer."""
        raise NotImplementedError


class MessageSerializer(serializers.Serializer[Any]):
    """Something was done."""

    message = serializers.CharField()
