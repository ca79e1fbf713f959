"""The ASGI application that a web server loads: `edge.py`, imported after Django's setup."""

import os
from typing import TYPE_CHECKING

from django.core.asgi import get_asgi_application

if TYPE_CHECKING:
    from localai_cluster.edge import Edge


def _create_application() -> "Edge":
    django = get_asgi_application()
    # It imports models, which need Django set up.
    from localai_cluster.edge import Edge

    return Edge(django)


os.environ.setdefault("DJANGO_SETTINGS_MODULE", "localai_cluster.settings")
application = _create_application()
