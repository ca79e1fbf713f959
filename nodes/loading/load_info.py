"""What a model needs and how it was last loaded, beyond every row and node: `ModelLoadInfo`.

After each load its controller has the worker measure the engine. Where the worker does not tell, as a stock
worker, a pass compares the node's readings before and after the load, if the engine had its GPUs alone. A
reading is stored once for each replica: the last five of a definition, backend build and kind of device. A
load has one need for the whole fleet, by the largest reading for any build and kind of device that nodes have
(`fit.learned`). What the model takes on a node without VRAM is main memory; no placement uses it.

A definition that cannot be read is replaced by that of the last load, never one that a person has deleted or
disabled. A folder that is empty has no definitions, so an empty mount point counts as deleted ones.
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
from localai_cluster.kit.commit_hooks import committed
from localai_cluster.messaging.messages import RunningModel
from nodes.commands.outcomes import Done, Unreadable
from nodes.definitions.files import Definition
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.definitions.rows import SOURCE
from nodes.loading.load_attempts import Attempt
from nodes.models import ModelDefinition, ModelLoadInfo, NodeBackend, NodeModel, Phase
from nodes.placement.fit import LARGEST, MOST_READINGS, EngineReading
from nodes.replicas import reserved_memory
from operations.executor.work import in_thread

log = logging.getLogger(__name__)

MEASURED_WITHIN = 3.0
"""Seconds that a worker has to measure an engine. Neither the load nor a request waits for it."""
SETTLES = timedelta(seconds=2)
"""Time after a load until a reading shows all of its memory: clocks differ, and readings take time."""
MOST_AT_ONCE = 50
"""Readings that a pass stores, each in a transaction of its own."""
MOST_KEYS = 8
"""Definitions, builds and devices whose readings are kept for a model, the latest ones."""
_BUILD = Coalesce(NullIf("digest", Value("")), NullIf("version", Value("")), "uri")
_DEVICE = Case(When(node__total_vram=0, then=Value("cpu")), default=F("node__gpu_vendor"))
_KEY = JSONObject(build=_BUILD, device=_DEVICE)


def columns_of(definition: Definition, now: datetime) -> dict[str, Any]:
    """Return the columns that keep the definition of a load."""
    stored: dict[str, Any] = {}
    with suppress(UnicodeEncodeError):  # lone surrogates; nor does PostgreSQL store NUL
        content = msgspec.json.encode(definition)
        stored = {} if b"\\u0000" in content else json.loads(content)
    return {"definition": stored, "withdrawn_at": now if definition.disabled else None}


async def find_definition(models: Folder, name: str) -> Definition | None:
    """Return the model's definition, or that of its last load while the file or the folder is unreadable.

    Raises FolderUnresponsive if there is none and the folder does not respond.
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
    """Return the definitions of those models that have one, as `find_definition` does; at most one query.

    Raises FolderUnresponsive before the folder was read for the first time.
    """
    definitions = {definition.name: definition for definition in await models.all()}
    if not definitions.keys() >= set(model_names):  # one may have been added a moment ago
        definitions = {definition.name: definition for definition in await models.reload()}
    missing = [name for name in model_names if name not in definitions]
    if missing and (unreadable := await models.unreadable_files()) != frozenset():
        infos = ModelLoadInfo.objects.filter(model_name__in=missing)
        remembered = await in_thread(lambda: list(_definitions(infos, unreadable)))
        definitions |= {definition.name: definition for definition in remembered}
    return {name: definitions[name] for name in model_names if name in definitions}


def _last_definition(name: str, unreadable: frozenset[str] | None) -> Definition | None:
    if names.unprintable(name):
        return None
    return next(iter(_definitions(ModelLoadInfo.objects.filter(model_name=name), unreadable)), None)


def revisions_of_unreadable(unreadable: frozenset[str] | None) -> dict[str, str]:
    """Return the revisions of the models whose definitions cannot be read, None = all files; one query."""
    if unreadable == frozenset():
        return {}
    definitions = _definitions(ModelLoadInfo.objects.all(), unreadable)
    return {definition.name: definition.revision for definition in definitions}


def _definitions(infos: Any, unreadable: frozenset[str] | None) -> Iterable[Definition]:
    # A row that a person has deleted or disabled counts at once, before a pass withdraws the record.
    enabled = ModelDefinition.objects.filter(
        name=OuterRef("model_name"), deleted_at__isnull=True, disabled=False
    )
    usable = infos.filter(withdrawn_at__isnull=True).exclude(definition={})
    usable = usable.exclude(~Exists(enabled), definition__source__startswith=SOURCE)
    for content in usable.values_list("definition", flat=True):
        with suppress(msgspec.ValidationError):  # another version has stored it
            definition = msgspec.convert(content, Definition)
            if unreadable is None or definition.source in unreadable:
                yield definition


def withdraw(defined: Iterable[Definition], unreadable: frozenset[str] | None, now: datetime) -> int:
    """Withdraw the records of models whose definition is gone or disabled; return their number.

    A withdrawn record is restored when the definition of its load is there again and enabled. `defined` are
    the usable definitions. While the folder cannot be read, nothing is known. The number of queries is
    constant.
    """
    if unreadable is None:
        return 0
    enabled = {definition.name: definition for definition in defined if not definition.disabled}
    withdrawn = ModelLoadInfo.objects.filter(withdrawn_at__isnull=False, model_name__in=enabled)
    restored = []
    for info in withdrawn.only("model_name", "definition"):
        definition = enabled[info.model_name]
        if info.definition.get("revision") == definition.revision:
            # What is no part of the revision may have changed, as `disabled` and the name of the file.
            info.definition, info.withdrawn_at = columns_of(definition, now).values()
            restored.append(info)
    ModelLoadInfo.objects.bulk_update(restored, ["definition", "withdrawn_at"])
    infos = ModelLoadInfo.objects.filter(withdrawn_at__isnull=True).exclude(model_name__in=enabled)
    return infos.exclude(definition__source__in=sorted(unreadable)).update(withdrawn_at=now)


def readings_of(definition: Definition) -> list[EngineReading]:
    """Return the readings of its backend for builds and kinds of device of nodes with VRAM; one query."""
    installed = NodeBackend.objects.named(definition.backend).filter(node__total_vram__gt=0)
    infos = ModelLoadInfo.objects.filter(
        model_name=definition.name, memory__contains=[{"revision": definition.revision}]
    )
    row = infos.values_list("memory", ArraySubquery(installed.values_list(_KEY).distinct())).first()
    return [] if row is None else _readings(definition, *row)


def readings_by_model(definitions: Sequence[Definition]) -> dict[str, list[EngineReading]]:
    """Return the readings of each model by its name, as `readings_of` does; two queries for any number."""
    model_names = [definition.name for definition in definitions]
    infos = ModelLoadInfo.objects.filter(model_name__in=model_names)
    memory = dict(infos.values_list("model_name", "memory"))
    keys: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    installed = NodeBackend.objects.filter(node__total_vram__gt=0).order_by()
    for name, alias, key in installed.values_list("name", "alias", _KEY).distinct():
        for backend in {name.upper(), alias.upper()}:
            keys[backend].append(key)
    return {
        definition.name: _readings(
            definition, memory.get(definition.name, ()), keys[definition.backend.upper()]
        )
        for definition in definitions
    }


def _readings(definition: Definition, memory: Iterable[Any], keys: Collection[Any]) -> list[EngineReading]:
    """Return the readings of this definition in `memory` for these builds and devices."""
    return [
        EngineReading(*reading)
        for entry in memory
        if entry["revision"] == definition.revision
        and {"build": entry["build"], "device": entry["device"]} in keys
        for reading in entry["readings"]
    ]


async def learn(attempt: Attempt) -> None:
    """Have the worker measure the engine that has just begun to serve; a failure loses only this reading."""
    try:
        outcome = await attempt.worker.running(attempt.process_key, MEASURED_WITHIN)
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
    """Store the worker's measurement; return False without one, or if a reading of the replica counts."""
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
    return _store(row, size, own=True, now=now)


def learn_from_readings(*, now: datetime) -> int:
    """Store the memory that engines took of GPUs which they had alone; return the number of engines.

    The longest loaded come first; those above the limit follow with the next pass.
    """
    ready = _unmeasured_replicas().filter(vram_alone=True, node__vram_read_at__gte=F("loaded_at") + SETTLES)
    return sum(
        _store(row, reserved_memory.taken_since_load(row), own=False, now=now)
        for row in ready.order_by("loaded_at", "id")[:MOST_AT_ONCE]
    )


def _unmeasured_replicas() -> Any:
    return NodeModel.objects.filter(phase=Phase.SERVING, measured_at__isnull=True).select_related("node")


def _store(row: NodeModel, size: int, *, own: bool, now: datetime) -> bool:
    """Add the reading of a replica, once, to those of its model; without a figure nothing is learned.

    A later reading may still come unless this one was the difference of the node's readings.
    """
    installed = NodeBackend.objects.named(row.backend_type).filter(node=row.node)
    key = installed.order_by("is_meta", "name").values_list(_KEY, flat=True).first()
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
                readings = [*stored["readings"], reading][-MOST_READINGS:]
            else:
                other_entries.append(stored)
        info.memory = [*other_entries, {**entry, "readings": readings}][-MOST_KEYS:]
        info.save(update_fields=["memory"])
    return True
