"""The components and raw routes of this package for the API document."""

from typing import Any

from localai_cluster.web.openapi import RawRoute
from localai_cluster.web.shapes import Named
from nodes.api import (
    catalogue,
    cluster_backends,
    engines,
    installed,
    join,
    models,
    node_backends,
    node_settings,
    nodes,
    registrations,
    stock,
)
from nodes.api.gallery import GALLERY
from nodes.api.heartbeats import HEARTBEAT
from nodes.api.worker_routes import WORKER_REFUSAL
from nodes.backends.catalogue import ENTRY, VARIANT, WHERE
from nodes.loading import reason_shapes
from nodes.registry import node_rows, shape
from nodes.scheduling.store import RULE, STATE
from operations.api import serializers

ROUTES: list[RawRoute] = [
    ("POST", "/api/node/{node_id}/heartbeat", HEARTBEAT),
    ("GET", "/api/node/{node_id}/gallery/{file}", GALLERY),
]
COMPONENTS: tuple[Named, ...] = (
    *shape.COMPONENTS,
    node_rows.APPROVED,
    node_rows.OUTCOME,
    node_rows.OUTCOMES,
    node_settings.CAP,
    node_settings.BUDGET,
    node_settings.RESET,
    nodes.EVENTS,
    node_backends.ACCEPTED,
    serializers.STARTED,
    node_backends.NODE_BACKEND,
    WHERE,
    ENTRY,
    VARIANT,
    catalogue.REPOSITORY,
    catalogue.GALLERY_ERROR,
    catalogue.CATALOGUE,
    *installed.COMPONENTS,
    *catalogue.COMPONENTS,
    *cluster_backends.COMPONENTS,
    *engines.COMPONENTS,
    *join.COMPONENTS,
    *models.COMPONENTS,
    *nodes.COMPONENTS,
    *stock.COMPONENTS,
    RULE,
    STATE,
    *reason_shapes.COMPONENTS,
    WORKER_REFUSAL,
    registrations.REGISTERED,
    registrations.REGISTRATION_REFUSAL,
)


def add_registration(endpoints: list[tuple[str, str, str, Any]]) -> list[tuple[str, str, str, Any]]:
    """Add the route that Django's resolver does not know; drf-spectacular's preprocessing hook."""
    path = "/api/node/register"
    return [*endpoints, (path, path, "POST", registrations.RegistrationDescription.as_view())]
