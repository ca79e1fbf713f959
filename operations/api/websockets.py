"""Websocket routes of operations; `localai_cluster/websockets.py` puts authentication in front of them."""

from typing import Any

from django.urls import re_path

from operations.consumers import OperationsConsumer

websocket_urlpatterns: list[Any] = [re_path(r"^ws/operations/?$", OperationsConsumer.as_asgi())]  # type: ignore[arg-type]
