"""The raw route tables: the HTTP and websocket routes in front of Django, with their applications.

`edge.py` dispatches by it; the OpenAPI document, and the tests that check every route, read it.
"""

import re
from dataclasses import dataclass
from typing import Any

from channels.routing import URLRouter
from channels.sessions import CookieMiddleware, SessionMiddleware
from django.urls import re_path

from localai_cluster.accounts.sessions import PrincipalMiddleware
from localai_cluster.kit import database_pool
from localai_cluster.scraping import MetricsApplication, RowReader
from localai_cluster.web import wire
from localai_cluster.web.sockets import LiveSocket, NoSuchSocket
from nodes.api.gallery import GalleryApplication
from nodes.api.heartbeats import HeartbeatApplication
from nodes.api.registrations import RegistrationApplication
from nodes.dialects import anthropic, audio_transcriptions, images, models, ollama, retrieval, text
from nodes.dialects.audio_speech import speech
from nodes.dialects.models import MODEL_PREFIX, list_models, show_model
from nodes.dialects.openai_common import LARGEST_BODY
from nodes.dialects.retrieval import embed, rerank
from nodes.dialects.tokens import count_tokens, detokenize, tokenize
from nodes.gateway.endpoint import Endpoint, Handler
from nodes.live import watch as nodes
from nodes.live import worker_logs
from nodes.registry import heartbeats
from operations.changes import topics as operations

_operations: Any = LiveSocket.as_asgi(topics=(operations.single_changes,))
_feed: Any = LiveSocket.as_asgi(
    topics=(operations.grouped_changes, nodes.node_messages, nodes.alive_messages),
    greeting=nodes.greeting,
    explains=True,
)
_logs: Any = LiveSocket.as_asgi(topics=(worker_logs.output,), admit=worker_logs.admit, explains=True)
_unknown: Any = NoSuchSocket.as_asgi()

websocket_application: Any = CookieMiddleware(
    SessionMiddleware(
        PrincipalMiddleware(
            URLRouter(
                [
                    re_path(r"^ws/operations/?$", _operations),
                    re_path(r"^ws/feed/?$", _feed),
                    re_path(r"^ws/nodes/(?P<node_id>[^/]+)/backend-logs/(?P<model>.+)$", _logs),
                    re_path(r"", _unknown),
                ]
            )
        )
    )
)


_PARAMETER = re.compile(r"\{[^/}]+\}")


@dataclass(frozen=True)
class RawRoute:
    """One route; `path` is an OpenAPI template."""

    method: str
    path: str
    app: Any


def _anthropic(handler: Handler) -> Endpoint:
    return Endpoint("POST", handler, LARGEST_BODY, refused=anthropic.render_error)


def _ollama(method: str, handler: Handler, limit: int | None = None) -> Endpoint:
    return Endpoint(method, handler, limit, refused=ollama.render_error)


_embeddings = Endpoint("POST", embed)
_models = Endpoint("GET", list_models)
_TEXT = {
    "/chat/completions": Endpoint("POST", text.chat, LARGEST_BODY),
    "/completions": Endpoint("POST", text.completions, LARGEST_BODY),
    "/responses": Endpoint("POST", text.openai_responses, LARGEST_BODY),
    "/messages": _anthropic(text.messages),
    "/messages/count_tokens": _anthropic(count_tokens),
    "/tokenize": Endpoint("POST", tokenize, LARGEST_BODY),
    "/detokenize": Endpoint("POST", detokenize, LARGEST_BODY),
    "/rerank": Endpoint("POST", rerank, LARGEST_BODY),
}
_MEDIA = {
    "/audio/transcriptions": Endpoint(
        "POST", audio_transcriptions.transcribe, audio_transcriptions.LARGEST_BODY, form=True
    ),
    "/audio/speech": Endpoint("POST", speech(tells_node=True), wire.MAX_BODY),
    "/images/generations": Endpoint("POST", images.generate, wire.MAX_BODY),
}

ROUTES: tuple[RawRoute, ...] = (
    *(
        RawRoute("POST", prefix + path, app)
        for path, app in (_TEXT | _MEDIA).items()
        for prefix in ("/v1", "")
    ),
    RawRoute("POST", "/tts", Endpoint("POST", speech(tells_node=False), wire.MAX_BODY)),
    RawRoute("POST", "/api/chat", _ollama("POST", text.ollama_chat, LARGEST_BODY)),
    RawRoute("POST", "/api/generate", _ollama("POST", text.ollama_generate, LARGEST_BODY)),
    RawRoute("POST", "/api/embed", _ollama("POST", retrieval.ollama_embed)),
    RawRoute("POST", "/api/embeddings", _ollama("POST", retrieval.ollama_embed_one)),
    RawRoute("POST", "/api/show", _ollama("POST", models.show)),
    RawRoute("GET", "/api/tags", _ollama("GET", models.tags)),
    RawRoute("GET", "/api/ps", _ollama("GET", models.running)),
    RawRoute("GET", "/api/version", _ollama("GET", models.version)),
    RawRoute("POST", "/v1/embeddings", _embeddings),
    RawRoute("POST", "/embeddings", _embeddings),
    RawRoute("GET", "/v1/models", _models),
    RawRoute("GET", "/models", _models),
    RawRoute("GET", MODEL_PREFIX + "{model}", Endpoint("GET", show_model)),
    RawRoute("GET", "/metrics", MetricsApplication("web", RowReader())),
    RawRoute("POST", "/api/node/register", RegistrationApplication()),
    RawRoute("GET", "/api/node/{node_id}/gallery/{file}", GalleryApplication()),
    RawRoute(
        "POST",
        "/api/node/{node_id}/heartbeat",
        HeartbeatApplication(database_pool.shared, heartbeats.identity_cache()),
    ),
)

_EXACT = {route.path: route.app for route in ROUTES if "{" not in route.path}
# A model's name may contain `/`.
_PATTERNS = [
    (re.compile(_PARAMETER.sub("[^/]+", route.path.replace("{model}", ".+"))), route.app)
    for route in ROUTES
    if "{" in route.path
]


def find(path: str) -> Any | None:
    """Return the raw application of a path (without a trailing slash), None if the path is Django's."""
    app = _EXACT.get(path)
    if app is not None:
        return app
    return next((app for pattern, app in _PATTERNS if pattern.fullmatch(path)), None)
