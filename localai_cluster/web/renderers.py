"""Fast JSON responses: long lists spend more time in the encoder than in the database."""

from collections.abc import Mapping
from typing import Any

import orjson
from rest_framework.renderers import BaseRenderer


class FastJSONRenderer(BaseRenderer):
    """JSON of plain values; times in UTC end in `Z`, ids are texts."""

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
        """Return the encoded response; empty for a response without a body."""
        return b"" if data is None else orjson.dumps(data, option=orjson.OPT_UTC_Z)
