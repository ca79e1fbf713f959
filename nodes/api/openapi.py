"""What this room adds to the API document: its shapes, the raw routes of workers, and registration."""

from typing import Any

from localai_cluster.web.openapi import RawRoute
from localai_cluster.web.shapes import Named
from nodes.api import (
    backends,
    catalogue,
    cluster_backends,
    definitions,
    engines,
    events,
    gallery_lists,
    installed,
    installs,
    join_tokens,
    load_status,
    overrides,
    plain_commands,
    registrations,
    samples,
    worker_logs,
)
from nodes.api.gallery import GALLERY
from nodes.api.heartbeats import HEARTBEAT
from nodes.api.worker_auth import WORKER_REFUSAL
from nodes.backends.catalogue import ENTRY, WHERE
from nodes.loading import fit_check, reason_shapes
from nodes.registry import outcomes, shape
from nodes.scheduling.store import RULE, STATE

ROUTES: list[RawRoute] = [
    ("POST", "/api/node/{node_id}/heartbeat", HEARTBEAT),
    ("GET", "/api/node/{node_id}/gallery/{file}", GALLERY),
]
COMPONENTS: tuple[Named, ...] = (
    *shape.COMPONENTS,
    outcomes.APPROVED,
    outcomes.OUTCOME,
    outcomes.OUTCOMES,
    overrides.CAP,
    overrides.BUDGET,
    overrides.RESET,
    events.EVENTS,
    installs.ACCEPTED,
    cluster_backends.STARTED,
    backends.NODE_BACKEND,
    WHERE,
    ENTRY,
    catalogue.REPOSITORY,
    catalogue.GALLERY_ERROR,
    catalogue.CATALOGUE,
    *installed.COMPONENTS,
    *gallery_lists.COMPONENTS,
    *plain_commands.COMPONENTS,
    *engines.COMPONENTS,
    *join_tokens.COMPONENTS,
    *load_status.COMPONENTS,
    worker_logs.LOG_LINE,
    *definitions.COMPONENTS,
    *samples.COMPONENTS,
    RULE,
    STATE,
    *reason_shapes.COMPONENTS,
    *fit_check.COMPONENTS,
    WORKER_REFUSAL,
    registrations.REGISTERED,
    registrations.REGISTRATION_REFUSAL,
)


def add_registration(endpoints: list[tuple[str, str, str, Any]]) -> list[tuple[str, str, str, Any]]:
    """drf-spectacular's preprocessing hook: adds the route that Django's resolver does not know."""
    path = "/api/node/register"
    return [*endpoints, (path, path, "POST", registrations.RegistrationDescription.as_view())]
