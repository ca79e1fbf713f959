"""The ASGI application that a web server loads: `edge.py`, imported after Django's setup."""

import os
from typing import TYPE_CHECKING

import django
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase

if TYPE_CHECKING:
    from localai_cluster.edge import Edge


class OneThreadHandler(ASGIHandler):
    """Django's handler, which runs the middleware and the view of a request in one call to its thread.

    Django's own handler changes threads for each hook of each middleware. Every view here is synchronous.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        """Build the synchronous chain."""
        super().load_middleware(is_async=False)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """Return the response."""
        return await sync_to_async(self.get_response, thread_sensitive=True)(request)


def _create_application() -> "Edge":
    django.setup(set_prefix=False)
    # It imports models, which need Django set up.
    from localai_cluster.edge import Edge

    return Edge(OneThreadHandler())


os.environ.setdefault("DJANGO_SETTINGS_MODULE", "localai_cluster.settings")
application = _create_application()
