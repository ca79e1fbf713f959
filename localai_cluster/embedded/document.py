"""Prints the OpenAPI document as JSON, without a server or a database."""

import os
import sys

import orjson

_STAND_INS = {
    "DJANGO_SETTINGS_MODULE": "localai_cluster.settings",
    "DATABASE_URL": "postgresql:///nowhere",
    "SECRET_KEY": "not-used-to-print-a-document",
}


def main() -> None:
    """Writes the document to standard output."""
    os.environ.update(_STAND_INS)
    import django

    django.setup()
    from drf_spectacular.generators import SchemaGenerator

    document = SchemaGenerator().get_schema(request=None, public=True)  # type: ignore[no-untyped-call]
    sys.stdout.buffer.write(orjson.dumps(document, option=orjson.OPT_SORT_KEYS | orjson.OPT_INDENT_2))


if __name__ == "__main__":
    main()
