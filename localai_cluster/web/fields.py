"""Building blocks of JSON shapes: strict fields, null as absence, and corrections of the API document."""

from typing import Any

from rest_framework import serializers


class Strict:
    """Refuses values that DRF would convert: a number is not a text, a text or a bool is not a number."""

    accepts: type | tuple[type, ...]
    complaint: str

    def to_internal_value(self, data: Any) -> Any:
        """Return the value if it has the right JSON type."""
        if not isinstance(data, self.accepts) or isinstance(data, bool):
            raise serializers.ValidationError(self.complaint)
        return super().to_internal_value(data)  # type: ignore[misc]


class Text(Strict, serializers.CharField):
    """A JSON string, kept as sent."""

    accepts = str
    complaint = "must be a string"

    def __init__(self, *, max_length: int, **options: Any) -> None:
        super().__init__(max_length=max_length, trim_whitespace=False, allow_blank=True, **options)


class Whole(Strict, serializers.IntegerField):
    """A JSON whole number."""

    accepts = int
    complaint = "must be a whole number"


class Number(Strict, serializers.FloatField):
    """A JSON number."""

    accepts = (int, float)
    complaint = "must be a number"

    def to_internal_value(self, data: Any) -> Any:
        """Return the number if it fits in a float."""
        try:
            return super().to_internal_value(data)
        except OverflowError:
            raise serializers.ValidationError("is too large") from None


class Flag(Strict, serializers.BooleanField):
    """A JSON boolean."""

    accepts = bool
    complaint = "must be true or false"

    def to_internal_value(self, data: Any) -> bool:
        """Return the value if it is a boolean."""
        if not isinstance(data, bool):
            raise serializers.ValidationError(self.complaint)
        return data


class NullIsAbsent(serializers.Serializer[Any]):
    """JSON null means the same as leaving the field out."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the fields that are not null."""
        values: dict[str, Any] = super().to_internal_value(data)
        return {name: value for name, value in values.items() if value is not None}


class Described:
    """A serializer that corrects the description which the API document makes from its fields."""

    @classmethod
    def described(cls, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the corrected schema."""
        raise NotImplementedError


class MessageSerializer(serializers.Serializer[Any]):
    """Something was done."""

    message = serializers.CharField()
