"""Routes that only the reference's pages call: state of the host, configuration, pin and reload of a model.

The control plane runs no engines, so `/system` and `/api/resources` describe all healthy nodes together.
"""

import asyncio
import base64
import contextlib
import json
from collections.abc import Iterable
from typing import Any

from asgiref.sync import async_to_sync
from drf_spectacular.utils import OpenApiParameter
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from localai_cluster.kit import clock, errors
from localai_cluster.kit.quantities import counted
from localai_cluster.web.openapi import describe
from localai_cluster.web.shapes import BYTES, FLAG, NUMBER, TEXT, TEXTS, UUID, Row, Shape, count, field
from nodes.api import definitions
from nodes.api.base import JOB_ID, ModelRoute
from nodes.backends import installed
from nodes.definitions import folder
from nodes.definitions.files import Definition
from nodes.definitions.sizes import MEASURE_LIMIT
from nodes.models import BackendNode, NodeModel, NodeType
from nodes.scheduling import store

LOADED_MODEL_SHAPE = Shape(
    "LoadedModel",
    "A model that a node serves.",
    [field("id", TEXT, example="m"), field("backend", TEXT, example="minilm", optional=True)],
)
SYSTEM_SHAPE = Shape(
    "System",
    "Backends of all nodes, and the models that are loaded.",
    [field("backends", TEXTS, example=["minilm"]), field("loaded_models", LOADED_MODEL_SHAPE.many)],
)
GPU_USE_SHAPE = Shape(
    "GpuUse",
    "A GPU of a node; all GPUs of a node whose worker tells only their sum.",
    [
        field("index", count(), "Its place in this list.", example=0),
        field("name", TEXT, "With its node.", example="NVIDIA L4 on gpu-a"),
        field("vendor", TEXT, example="nvidia"),
        field("total_vram", BYTES, example=25769803776),
        field("used_vram", BYTES, example=4294967296),
        field("free_vram", BYTES, example=21474836480),
        field("usage_percent", NUMBER, example=16.7),
    ],
)
RAM_USE_SHAPE = Shape(
    "RamUse",
    "Main memory of all nodes.",
    [
        field("total", BYTES, example=68719476736),
        field("used", BYTES, example=17179869184),
        field("free", BYTES, example=51539607552),
        field("available", BYTES, example=51539607552),
        field("usage_percent", NUMBER, example=25.0),
    ],
)
MEMORY_SUM_SHAPE = Shape(
    "MemorySum",
    "GPU memory of all nodes, main memory where there is none.",
    [
        field("total_memory", BYTES, example=25769803776),
        field("used_memory", BYTES, example=4294967296),
        field("free_memory", BYTES, example=21474836480),
        field("usage_percent", NUMBER, example=16.7),
        field("gpu_count", count(), example=1),
    ],
)
RESOURCES_SHAPE = Shape(
    "Resources",
    "Memory of the healthy nodes. There is no reclaimer: its fields say so.",
    [
        field("type", {"type": "string", "enum": ["gpu", "ram"]}, example="gpu"),
        field("available", FLAG, "Any node tells its memory.", example=True),
        field("gpus", GPU_USE_SHAPE.many, nullable=True),
        field("ram", RAM_USE_SHAPE.ref, nullable=True),
        field("aggregate", MEMORY_SUM_SHAPE.ref),
        field("storage_size", BYTES, "Files of the defined models.", example=4831838208),
        field("reclaimer_enabled", FLAG, example=False),
        field("reclaimer_threshold", NUMBER, example=0),
        field("watchdog_interval", TEXT, example="0s"),
    ],
)
RELOADED_SHAPE = Shape(
    "ModelsReloaded",
    "The definitions were read again.",
    [
        field("success", FLAG, example=True),
        field("message", TEXT, example="2 models are defined"),
        field(
            "pending_cleanup",
            count(),
            "Always 0: replicas of former definitions end by themselves.",
            example=0,
        ),
    ],
)
CHANGED_SHAPE = Shape(
    "ModelChanged",
    "What was done.",
    [
        field("success", FLAG, example=True),
        field("message", TEXT, example="model m keeps at least one replica"),
    ],
)
_MODEL_PARAMETER = OpenApiParameter("model", str, OpenApiParameter.PATH)


class SystemView(APIView):
    """`/system`."""

    @describe("system", "List backends and loaded models", SYSTEM_SHAPE, tag="nodes")
    def get(self, request: Request) -> Response:
        """Returns the backends of approved nodes and the loaded models, each name once."""
        backends = [backend.name for backend in installed.read()]
        loaded = NodeModel.objects.loaded().order_by("model_name", "backend_type")
        pairs = loaded.values_list("model_name", "backend_type").distinct()
        models = [LOADED_MODEL_SHAPE.of(id=model, backend=backend) for model, backend in pairs]
        return Response(SYSTEM_SHAPE.of(backends=backends, loaded_models=models))


class ResourcesView(APIView):
    """`/api/resources`."""

    @describe("resources", "Show the memory of the cluster", RESOURCES_SHAPE, tag="nodes")
    def get(self, request: Request) -> Response:
        """Returns the memory that the last heartbeats of the healthy nodes report."""
        nodes = list(
            BackendNode.objects.filter(status="healthy", node_type=NodeType.BACKEND).order_by("name")
        )
        gpus = [GPU_USE_SHAPE.of(index=index, **gpu) for index, gpu in enumerate(_gpu_rows(nodes))]
        ram = _sum_memory((node.total_ram, node.available_ram) for node in nodes)
        vram = _sum_memory((gpu["total_vram"], gpu["free_vram"]) for gpu in gpus)
        total, free = vram if gpus else ram
        used = total - free
        percent = _percent(total, free)
        whole = MEMORY_SUM_SHAPE.of(
            total_memory=total, used_memory=used, free_memory=free, usage_percent=percent, gpu_count=len(gpus)
        )
        body = RESOURCES_SHAPE.of(
            type="gpu" if gpus else "ram",
            available=total > 0,
            gpus=gpus or None,
            ram=_ram_row(*ram) if ram[0] else None,
            aggregate=whole,
            storage_size=async_to_sync(_storage_size)(),
            reclaimer_enabled=False,
            reclaimer_threshold=0,
            watchdog_interval="0s",
        )
        return Response(body)


def _gpu_rows(nodes: Iterable[BackendNode]) -> Iterable[Row]:
    for node in nodes:
        listed = [(gpu["name"] or "GPU", gpu["total_vram"], gpu["free_vram"]) for gpu in node.gpus]
        if not listed and node.total_vram:
            listed = [("GPU", node.total_vram, node.available_vram)]
        for name, total, free in listed:
            free = min(free, total)
            yield {
                "name": f"{name} on {node.name}",
                "vendor": node.gpu_vendor,
                "total_vram": total,
                "used_vram": total - free,
                "free_vram": free,
                "usage_percent": _percent(total, free),
            }


def _ram_row(total: int, free: int) -> Row:
    used = total - free
    return RAM_USE_SHAPE.of(
        total=total, used=used, free=free, available=free, usage_percent=_percent(total, free)
    )


def _sum_memory(figures: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the sums of total and of free bytes, where free bytes count only up to their total."""
    listed = [(total, min(free, total)) for total, free in figures]
    return sum(total for total, _ in listed), sum(free for _, free in listed)


def _percent(total: int, free: int) -> float:
    return round(100 * (total - free) / total, 2) if total else 0.0


_STORAGE_MAX_AGE = 60.0
_MAX_PARALLEL_MEASUREMENTS = 32
_last_measurement: tuple[float, int] = (float("-inf"), 0)
"""Time of the last measurement of the models' files (monotonic seconds), and the measured bytes."""


async def _storage_size() -> int:
    """Return the bytes of the files of all defined models, measured at most once a minute."""
    global _last_measurement
    measured_at, size = _last_measurement
    if clock.monotonic() - measured_at < _STORAGE_MAX_AGE:
        return size
    _last_measurement = (clock.monotonic(), size)  # a second caller does not measure as well
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(MEASURE_LIMIT):
            _last_measurement = (clock.monotonic(), await _measure_storage())
    return _last_measurement[1]


async def _measure_storage() -> int:
    """Measure the files of all definitions, a few definitions in parallel, because each needs a thread."""
    models, slots = folder.folder(), asyncio.Semaphore(_MAX_PARALLEL_MEASUREMENTS)

    async def measure(definition: Definition) -> int:
        async with slots:
            return (await models.sizes.of(definition)).payload

    return sum(await asyncio.gather(*map(measure, await models.all())))


class _DefinitionView(ModelRoute):
    """Base of the views for one definition."""

    def check_defined(self, model: str) -> None:
        """Raise NotFound unless the model is defined."""
        if async_to_sync(folder.folder().find)(model) is None:
            raise errors.NotFound("model configuration not found")


class ConfigurationView(_DefinitionView):
    """`/api/models/config-json/:model`."""

    @describe(
        "models_configuration",
        "Show the definition of a model",
        {"type": "object", "additionalProperties": True},
        refused=(404,),
        parameters=[_MODEL_PARAMETER],
        shown={"name": "m", "backend": "minilm", "parameters": {"model": "m.gguf"}},
        tag="nodes",
    )
    def get(self, request: Request, model: str) -> Response:
        """Returns the content of the model's file or stored definition as JSON."""
        self.check_defined(model)
        document: dict[str, Any] | None = async_to_sync(folder.folder().document)(model)
        if document is None:
            raise errors.NotFound("model configuration not found")
        return Response(_to_json(document))


def _to_json(value: Any) -> Any:
    """Convert a YAML value to JSON: keys and values of other types become texts."""
    match value:
        case dict():
            return {_json_key(key): _to_json(each) for key, each in value.items()}
        case list() | tuple() | set():
            return [_to_json(item) for item in value]
        case str():
            return value.encode("utf-8", "replace").decode()
        case bytes():
            return base64.b64encode(value).decode()
        case bool() | float() | None:
            return value
        case int() if -(2**63) <= value < 2**63:
            return value
    return str(value)


def _json_key(key: Any) -> str:
    """Convert a key of a YAML mapping to JSON's notation: `true` and `null` instead of Python's names."""
    return str(_to_json(key)) if not isinstance(key, bool | None) else json.dumps(key)


class PinView(_DefinitionView):
    """`/models/toggle-pinned/:model/:action`."""

    @describe(
        "models_pin",
        "Keep a model loaded, or no longer",
        CHANGED_SHAPE,
        refused=(404, 409),
        parameters=[
            _MODEL_PARAMETER,
            OpenApiParameter("action", str, OpenApiParameter.PATH, enum=["pin", "unpin"]),
        ],
        tag="scheduling",
    )
    def put(self, request: Request, model: str, action: str) -> Response:
        """Pins or unpins the model: `pin` sets its rule's minimum to at least 1, `unpin` to 0."""
        if action not in ("pin", "unpin"):
            raise errors.NotFound("unknown action; use pin or unpin")
        self.check_defined(model)
        store.set_pinned(model, action == "pin", clock.now())
        kept = "keeps at least one replica" if action == "pin" else "keeps no replica without requests"
        return Response(CHANGED_SHAPE.of(success=True, message=f"model {model} {kept}"))


REMOVAL_JOB_SHAPE = Shape(
    "ModelRemovalJob",
    "The operation that deletes the model.",
    [
        field("uuid", UUID, example=JOB_ID),
        field("status", TEXT, "Address of its state.", example=f"https://cluster/models/jobs/{JOB_ID}"),
    ],
)
REMOVAL_STARTED_SHAPE = Shape(
    "ModelRemovalStarted",
    "The operation that deletes the model.",
    [field("jobID", UUID, example=JOB_ID), field("message", TEXT, example="the definition is being deleted")],
)


class StockDeleteView(_DefinitionView):
    """`/models/delete/:model`."""

    @describe(
        "models_delete_stock",
        "Delete a model with its files (LocalAI)",
        REMOVAL_JOB_SHAPE,
        refused=(404, 409),
        parameters=[_MODEL_PARAMETER],
    )
    def post(self, request: Request, model: str) -> Response:
        """Unloads the model, deletes its stored definition, and the files that no other definition names.

        409 for a model that only a file of the models folder defines.
        """
        job = definitions.remove(request, model, with_files=True)["jobID"]
        return Response(
            REMOVAL_JOB_SHAPE.of(uuid=job, status=request.build_absolute_uri(f"/models/jobs/{job}"))
        )


class StockDeleteByIdView(_DefinitionView):
    """`/api/models/delete/:model`."""

    @describe(
        "models_delete_by_id",
        "Delete a model with its files (LocalAI, by gallery id)",
        REMOVAL_STARTED_SHAPE,
        refused=(404, 409),
        parameters=[_MODEL_PARAMETER],
    )
    def post(self, request: Request, model: str) -> Response:
        """Deletes the model like `/models/delete`; a gallery's name before `@` is ignored."""
        removal = definitions.remove(request, model.rpartition("@")[2], with_files=True)
        return Response(REMOVAL_STARTED_SHAPE.of(jobID=removal["jobID"], message=removal["message"]))


class ReloadView(_DefinitionView):
    """`/models/reload`."""

    @describe("models_reload", "Read the models folder again", RELOADED_SHAPE, tag="nodes")
    def post(self, request: Request) -> Response:
        """Reads the definitions again in this web process; the other processes do so within a few seconds."""
        number = len(async_to_sync(folder.folder().reload)())
        defined = counted(number, "model is defined", "models are defined")
        return Response(RELOADED_SHAPE.of(success=True, message=defined, pending_cleanup=0))
