"""What the API document says of the workers' own routes: headers, answers, and the two raw routes.

The heartbeat is described by hand. Registration is described by a view that serves no request: from it
drf-spectacular makes the same schemas that `registrations.py` reads bodies by.
"""

from typing import Any

from drf_spectacular.utils import (
    OpenApiExample,
    OpenApiParameter,
    OpenApiResponse,
    PolymorphicProxySerializer,
    extend_schema,
)
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request
from rest_framework.views import APIView

from localai_cluster.web import fields
from localai_cluster.web.openapi import Operation, RawRoute, RefusalSerializer, json_body, refusals
from nodes.api import worker_shapes
from nodes.registry import identity

_WRONG = "No credential, or a wrong one. `rotate`: the secret is right, but an admin wants it replaced."


def _header(name: str, digits: int, meaning: str, *, required: bool = False) -> OpenApiParameter:
    secret = f"[0-9a-f]{{{digits}}}"
    return OpenApiParameter(
        name,
        {"type": "string", "pattern": f"^{secret}$" if required else f"^({secret})?$"},
        OpenApiParameter.HEADER,
        required=required,
        description=meaning,
    )


SECRET = _header(
    identity.SECRET_HEADER, 64, "The worker's own secret, bound to the name by its first registration."
)
NEW_SECRET = _header(
    identity.NEW_SECRET_HEADER, 64, "What the worker proves itself by from now on.", required=True
)
INSTANCE = _header(
    identity.INSTANCE_HEADER,
    32,
    "One value for each worker process. A call under an earlier one is refused with 409: two processes use"
    " one data folder, or a copy of it.",
)

Responses = dict[int, Any]


def _example(value: Any, status: int) -> OpenApiExample:
    return OpenApiExample("answer", value, response_only=True, status_codes=[str(status)])


def self_service(answer: Any) -> Responses:
    """The answers of a route that proves the node in its URL."""
    wrong = OpenApiResponse(worker_shapes.WorkerRefusalSerializer, _WRONG)
    return {200: answer, **refusals(400, 403, 404, 409, 429), 401: wrong}


def done(message: str) -> Responses:
    """The same for a route that only says what it did."""
    example = _example({"message": message}, 200)
    return self_service(OpenApiResponse(fields.MessageSerializer, "Done.", [example]))


def _registered() -> Responses:
    who = {
        "id": "ef9b4900-b105-4cad-8a02-3033fa0df092",
        "name": "w1",
        "node_type": "backend",
        "status": "pending",
        "created_at": "2026-11-21T00:09:05.820188Z",
    }
    agent = {"name": "agent-1", "node_type": "agent", "status": "healthy", "api_token": "lai-" + "0f" * 32}
    either = PolymorphicProxySerializer(
        component_name="RegistrationRefusal",
        serializers=[worker_shapes.WorkerRefusalSerializer, RefusalSerializer],
        resource_type_field_name=None,
    )
    nested = {"error": {"code": 401, "message": "registration token required", "type": "node_error"}}
    return {
        201: OpenApiResponse(
            worker_shapes.RegisteredSerializer,
            "Registered; `pending` until an admin approves it.",
            [
                _example(who, 201),
                OpenApiExample("approved agent", who | agent, response_only=True, status_codes=["201"]),
            ],
        ),
        **refusals(400, 403, 409, 413, 429),
        401: OpenApiResponse(
            either,
            "A missing or wrong token: flat for the header's, nested for the body's.",
            [_example(nested, 401)],
        ),
    }


class RegistrationAuthentication(BaseAuthentication):
    """The shared registration token, which lets a worker register and nothing else."""

    def authenticate(self, request: Request) -> None:
        """Serves no request."""


class RegistrationDescription(APIView):
    """`/api/node/register` (§1.1, R1.29)."""

    authentication_classes = [RegistrationAuthentication]
    permission_classes = []

    @extend_schema(
        operation_id="node_register",
        tags=["worker"],
        request=worker_shapes.RegistrationSerializer,
        parameters=[SECRET, INSTANCE],
        responses=_registered(),
    )
    def post(self, request: Request) -> None:
        """Makes a worker known, or refreshes it after a restart. A new one waits for approval."""


def add_registration(endpoints: list[tuple[str, str, str, Any]]) -> list[tuple[str, str, str, Any]]:
    """drf-spectacular's preprocessing hook: adds the route that Django's resolver does not know."""
    path = "/api/node/register"
    return [*endpoints, (path, path, "POST", RegistrationDescription.as_view())]


def _figure(meaning: str) -> Operation:
    return {"type": "integer", "format": "int64", "minimum": 0, "nullable": True, "description": meaning}


def _refused(*statuses: int) -> dict[str, Operation]:
    meanings = {status: answer.description for status, answer in refusals(*statuses).items()}
    return {
        str(status): {"description": meaning, "content": json_body(_component("Refusal"))}
        for status, meaning in meanings.items()
    }


def _component(name: str) -> Operation:
    return {"$ref": f"#/components/schemas/{name}"}


def _parameter(header: OpenApiParameter) -> Operation:
    return {
        "name": header.name,
        "in": "header",
        "required": header.required,
        "schema": header.type,
        "description": header.description,
    }


HEARTBEAT: Operation = {
    "operationId": "node_heartbeat",
    "tags": ["worker"],
    "summary": "A sign of life with the figures that are known; an empty body is valid.",
    "description": (
        "A body that cannot be read is answered with 400 naming the field, and still counts as a sign of"
        " life. Figures count for approved nodes that are not offline."
    ),
    "security": [{"nodeSecret": []}],
    "parameters": [
        {"name": "node_id", "in": "path", "required": True, "schema": {"type": "string"}},
        _parameter(INSTANCE),
    ],
    "requestBody": {
        "content": json_body(
            {
                "type": "object",
                "properties": {
                    "available_vram": _figure("Free bytes over all GPUs; ends the soft reservation."),
                    "total_vram": _figure("Bytes over all GPUs; a budget in percent follows it."),
                    "available_ram": _figure("Free bytes of memory."),
                    "total_disk": _figure("Size of the filesystem of the models folder."),
                    "available_disk": _figure("Free bytes there; 0 means full."),
                    "gpu_vendor": {"type": "string", "maxLength": 32, "nullable": True},
                },
            },
            {"available_disk": 81634525184, "available_ram": 24667537408, "total_disk": 270553174016},
        )
    },
    "responses": {
        "200": {
            "description": "Recorded.",
            "content": json_body(_component("Message"), {"message": "heartbeat recorded"}),
        },
        "401": {
            "description": _WRONG,
            "content": json_body(_component("WorkerRefusal"), {"error": "invalid node credential"}),
        },
        **_refused(400, 403, 404, 409, 413, 429),
    },
}
ROUTES: list[RawRoute] = [("POST", "/api/node/{node_id}/heartbeat", HEARTBEAT)]
