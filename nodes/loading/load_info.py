"""The needs of a model and its last load (`ModelLoadInfo`), which outlive the rows of replicas and nodes.

After each load its controller requests a measurement of the engine from the worker. A stock worker does not
measure; then a pass compares the node's readings before and after the load, if the engine had its GPUs alone.
A reading is stored once for each replica; the last five of each definition, backend build and kind of device
are kept. A load has one need for the whole fleet, by the largest reading for any build and kind of device
that nodes have (`fit.apply_readings`). On a node without VRAM the readings are of main memory, which no
placement uses.

If a definition cannot be read, the definition of the last load is used instead, but never a deleted or
disabled one. An empty folder has no definitions, so at an empty mount point all definitions count as deleted.
"""

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from django.contrib.postgres.expressions import ArraySubquery
from django.db import Error as DatabaseError
from django.db.models import Case, Exists, F, OuterRef, Value, When
from django.db.models.functions import Coalesce, JSONObject, NullIf

from localai_cluster.kit import clock, names
from localai_cluster.kit.transactions import committed
from localai_cluster.messaging.messages import RunningModel
from nodes.commands.outcomes import Done, Unreadable
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.definitions.rows import SOURCE_PREFIX
from nodes.loading.load_attempts import Attempt
from nodes.models import ModelDefinition, ModelLoadInfo, NodeBackend, NodeModel, Phase
from nodes.placement.fit import LARGEST, MAX_READINGS, EngineReading
from nodes.replicas import reserved_memory
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

MEASUREMENT_TIMEOUT = 3.0
"""Seconds that a worker has to measure an engine. Neither the load nor a request waits for the result."""
SETTLE_TIME = timedelta(seconds=2)
"""Time after a load until a reading includes all of its memory: clocks differ, and readings take time."""
MAX_PARALLEL = 50
"""Maximum number of readings that one pass stores, each in its own transaction."""
MAX_KEYS = 8
"""Maximum combinations of definition, build and device for which a model keeps readings; the latest stay."""
_BUILD_EXPRESSION = Coalesce(NullIf("digest", Value("")), NullIf("version", Value("")), "uri")
_DEVICE_EXPRESSION = Case(When(node__total_vram=0, then=Value("cpu")), default=F("node__gpu_vendor"))
_READING_KEY_EXPRESSION = JSONObject(build=_BUILD_EXPRESSION, device=_DEVICE_EXPRESSION)


def columns_of(definition: Definition) -> dict[str, Any]:
    """Return the columns that store this definition as that of the model's last load."""
    stored: dict[str, Any] = {}
    with suppress(UnicodeEncodeError):  # lone surrogates; nor does PostgreSQL store NUL
        content = msgspec.json.encode(definition)
        stored = {} if b"\\u0000" in content else json.loads(content)
    return {"definition": stored, "withdrawn_at": None}


async def find_definition(models: Folder, name: str) -> Definition | None:
    """Return the model's definition; while it is unreadable, the definition of the model's last load.

    Raises FolderUnresponsive if there is neither and the folder does not respond.
    """
    try:
        definition = await models.find(name)
    except FolderUnresponsive:
        if (remembered := await in_thread(_last_definition, name, None)) is not None:
            return remembered
        raise
    if definition is not None or (unreadable := await models.unreadable_files()) == frozenset():
        return definition
    return await in_thread(_last_definition, name, unreadable)


async def find_definitions(models: Folder, model_names: Collection[str]) -> dict[str, Definition]:
    """Return the definitions of these models, as `find_definition` does; undefined models are left out.

    At most one query. Raises FolderUnresponsive before the folder was read for the first time.
    """
    definitions = {definition.name: definition for definition in await models.all()}
    if not definitions.keys() >= set(model_names):  # one may have been added a moment ago
        definitions = {definition.name: definition for definition in await models.reload()}
    missing = [name for name in model_names if name not in definitions]
    if missing and (unreadable := await models.unreadable_files()) != frozenset():
        infos = ModelLoadInfo.objects.filter(model_name__in=missing)
        remembered = await in_thread(lambda: list(_read_definitions(infos, unreadable)))
        definitions |= {definition.name: definition for definition in remembered}
    return {name: definitions[name] for name in model_names if name in definitions}


def _last_definition(name: str, unreadable: frozenset[str] | None) -> Definition | None:
    if names.find_unprintable(name):
        return None
    return next(iter(_read_definitions(ModelLoadInfo.objects.filter(model_name=name), unreadable)), None)


def revisions_of_unreadable(unreadable: frozenset[str] | None) -> dict[str, str]:
    """Return the last loaded revisions of models whose definitions are unreadable; None = all. One query."""
    if unreadable == frozenset():
        return {}
    definitions = _read_definitions(ModelLoadInfo.objects.all(), unreadable)
    return {definition.name: definition.revision for definition in definitions}


def _read_definitions(infos: Any, unreadable: frozenset[str] | None) -> Iterable[Definition]:
    # A row that a person has deleted or disabled counts at once, before a pass withdraws the record.
    enabled = ModelDefinition.objects.filter(
        name=OuterRef("model_name"), deleted_at__isnull=True, disabled=False
    )
    usable = infos.filter(withdrawn_at__isnull=True).exclude(definition={})
    usable = usable.exclude(~Exists(enabled), definition__source__startswith=SOURCE_PREFIX)
    for content in usable.values_list("definition", flat=True):
        with suppress(msgspec.ValidationError):  # another version has stored it
            definition = msgspec.convert(content, Definition)
            if unreadable is None or definition.source in unreadable:
                yield definition


def withdraw(defined: Iterable[Definition], unreadable: frozenset[str] | None, now: datetime) -> int:
    """Withdraw the stored last loads of models whose definition is deleted or disabled; return their number.

    A withdrawn one is restored when the definition exists again and is enabled. `defined` are the usable
    definitions. Nothing is withdrawn while the folder cannot be read (`unreadable` is None). The number of
    queries is constant.
    """
    if unreadable is None:
        return 0
    enabled = {definition.name: definition for definition in defined}
    withdrawn = ModelLoadInfo.objects.filter(withdrawn_at__isnull=False, model_name__in=enabled)
    restored = []
    for info in withdrawn.only("model_name", "definition"):
        definition = enabled[info.model_name]
        if info.definition.get("revision") == definition.revision:
            # What is no part of the revision may have changed, as the name of the file.
            info.definition, info.withdrawn_at = columns_of(definition).values()
            restored.append(info)
    ModelLoadInfo.objects.bulk_update(restored, ["definition", "withdrawn_at"])
    infos = ModelLoadInfo.objects.filter(withdrawn_at__isnull=True).exclude(model_name__in=enabled)
    return infos.exclude(definition__source__in=sorted(unreadable)).update(withdrawn_at=now)


def readings_of(definition: Definition) -> list[EngineReading]:
    """Return the readings of a definition, for builds and devices that nodes with VRAM have. One query."""
    installed = NodeBackend.objects.named(definition.backend).filter(node__total_vram__gt=0)
    infos = ModelLoadInfo.objects.filter(
        model_name=definition.name, memory__contains=[{"revision": definition.revision}]
    )
    row = infos.values_list(
        "memory", ArraySubquery(installed.values_list(_READING_KEY_EXPRESSION).distinct())
    ).first()
    return [] if row is None else _matching_readings(definition, *row)


def readings_by_model(definitions: Sequence[Definition]) -> dict[str, list[EngineReading]]:
    """Return the readings of each definition by model name, like `readings_of`.

    Two queries for any number.
    """
    model_names = [definition.name for definition in definitions]
    infos = ModelLoadInfo.objects.filter(model_name__in=model_names)
    memory = dict(infos.values_list("model_name", "memory"))
    keys: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    installed = NodeBackend.objects.filter(node__total_vram__gt=0).order_by()
    for name, alias, key in installed.values_list("name", "alias", _READING_KEY_EXPRESSION).distinct():
        for backend in {name.upper(), alias.upper()}:
            keys[backend].append(key)
    return {
        definition.name: _matching_readings(
            definition, memory.get(definition.name, ()), keys[definition.backend.upper()]
        )
        for definition in definitions
    }


def _matching_readings(
    definition: Definition, memory: Iterable[Any], keys: Collection[Any]
) -> list[EngineReading]:
    """Return the readings of this definition in `memory` for these builds and devices."""
    return [
        EngineReading(*reading)
        for entry in memory
        if entry["revision"] == definition.revision
        and {"build": entry["build"], "device": entry["device"]} in keys
        for reading in entry["readings"]
    ]


async def learn(attempt: Attempt) -> None:
    """Ask the worker to measure an engine that has just begun to serve; a failure loses only this reading."""
    try:
        outcome = await attempt.worker.running(attempt.process_key, MEASUREMENT_TIMEOUT)
        if isinstance(outcome, Unreadable):
            log.warning(
                "%s: its report of %s: %s", attempt.slot.node_name, attempt.process_key, outcome.reason
            )
        if isinstance(outcome, Done):
            key = attempt.definition.name, attempt.slot.replica_index
            engines = [
                engine for engine in outcome.reply.models if (engine.model_id, engine.replica_index) == key
            ]
            for engine in engines[:1]:
                await in_thread(store_report, attempt.slot.id, engine, now=clock.now())
    except DatabaseError as error:
        log.warning("the memory of %s was not stored: %s", attempt.process_key, error)


def store_report(replica_id: UUID, engine: RunningModel, *, now: datetime) -> bool:
    """Store the worker's measurement; return False if it cannot be used or the replica has a reading."""
    row = _unmeasured_replicas().filter(pk=replica_id).first()
    if row is None or row.address.rpartition(":")[2] != engine.address.rpartition(":")[2]:
        return False
    node = row.node
    unified = node.gpu_vendor == "apple"
    size, total = (
        (engine.vram, node.total_vram) if node.total_vram and not unified else (engine.ram, node.total_ram)
    )
    if not 0 <= size <= (total or LARGEST):
        log.warning("%s reports %d bytes for %s, which is impossible", node.name, size, row)
        return False
    return _store_reading(row, size, own=True, now=now)


def learn_from_readings(*, now: datetime) -> int:
    """Store the memory of engines that had their GPUs alone, from their nodes' readings; return their number.

    Engines that were loaded first come first. Engines above the limit are left to the next pass.
    """
    ready = _unmeasured_replicas().filter(
        vram_alone=True, node__vram_read_at__gte=F("loaded_at") + SETTLE_TIME
    )
    return sum(
        _store_reading(row, reserved_memory.taken_since_load(row), own=False, now=now)
        for row in ready.order_by("loaded_at", "id")[:MAX_PARALLEL]
    )


def _unmeasured_replicas() -> Any:
    return NodeModel.objects.filter(phase=Phase.SERVING, measured_at__isnull=True).select_related("node")


def _store_reading(row: NodeModel, size: int, *, own: bool, now: datetime) -> bool:
    """Add the reading of a replica to its model, once; return True if it was added.

    A worker's report without a size leaves the replica unmeasured, so a later reading can still be added.
    """
    installed = NodeBackend.objects.named(row.backend_type).filter(node=row.node)
    key = installed.order_by("is_meta", "name").values_list(_READING_KEY_EXPRESSION, flat=True).first()
    if own and (size <= 0 or key is None):
        return False
    with committed("load.learn"):
        is_first = _unmeasured_replicas().filter(pk=row.pk).update(measured_at=now)
        if not is_first or size <= 0 or key is None:
            return False
        info = ModelLoadInfo.objects.select_for_update().filter(model_name=row.model_name).first()
        if info is None or info.model_options != row.model_options:
            return False  # loaded otherwise than its definition says
        entry = {"revision": row.config_revision, **key}
        reading = [size, now.isoformat(), own]
        readings, other_entries = [reading], []
        for stored in info.memory:
            if {**stored, **entry} == stored:
                readings = [*stored["readings"], reading][-MAX_READINGS:]
            else:
                other_entries.append(stored)
        info.memory = [*other_entries, {**entry, "readings": readings}][-MAX_KEYS:]
        info.save(update_fields=["memory"])
    return True
