"""The kinds of operations on nodes, models and backends, as `operations` runs them.

Handlers are imported where they are made: only controllers need them.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from localai_cluster.kit import conf
from nodes.backends import admission, backend_requests, node_stop, wait_reasons, wave_requests
from nodes.downloads import imports, unused_files
from nodes.loading import load_request, source_downloads
from nodes.registry import bulk
from nodes.replicas import drains, unload_requests
from operations import kinds
from operations.executor.work import Handler
from operations.kinds import HandlerContext, OperationKind
from operations.ledger.admission import Admission, Requester
from operations.models import Operation, TaskType


class BackendTargets:
    """Operations on backends: each target is an intent of its node."""

    def cancel(self, operation_id: UUID, *, actor: str, now: datetime, node_id: UUID | None) -> Operation:
        """Cancel the operation, or its target on one node, with its intents."""
        return admission.cancel(operation_id, actor=actor, now=now, node_id=node_id)

    def retry(
        self, operation_id: UUID, *, nodes: Sequence[UUID], requester: Requester, now: datetime
    ) -> Admission:
        """Repeat the targets that failed, on these nodes or on all."""
        scope = backend_requests.RequestScope([], requester)
        return admission.retry(operation_id, only=nodes, asked_by=scope, now=now)


def _load(context: HandlerContext) -> Handler:
    from nodes.definitions.folder import folder
    from nodes.loading import load

    return load.LoadModel(context.bus, folder(), context.wake_ups)


def _unload(context: HandlerContext) -> Handler:
    from nodes.replicas import unload_requests

    return unload_requests.UnloadModel(context.bus)


def _delete(context: HandlerContext) -> Handler:
    from nodes.replicas import unload_requests

    return unload_requests.DeleteModel(context.bus)


def _import(context: HandlerContext) -> Handler:
    from nodes.downloads.imports import ImportModel
    from nodes.sources.opening import SourceFileOpener

    return ImportModel(SourceFileOpener(conf.cluster()))


def _remove_files(context: HandlerContext) -> Handler:
    from nodes.downloads.unused_files import RemoveFiles

    return RemoveFiles()


def _remove_definition(context: HandlerContext) -> Handler:
    from nodes.loading import definition_removal

    return definition_removal.RemoveDefinition(context.bus)


def _identity_of_bulk_retry(operation: Operation, node_ids: Sequence[UUID]) -> tuple[str, str]:
    """Return a key and element of its own, so that a request for all nodes does not join a retry on fewer."""
    return bulk.key_and_element(operation.kind, operation.payload["options"], node_ids)


_BACKEND_TASKS = {
    backend_requests.INSTALL: TaskType.INSTALLATION,
    backend_requests.UPGRADE: TaskType.UPGRADE,
    backend_requests.DELETE: TaskType.DELETION,
}


class NodeHooks:
    """The operations on nodes and waves that the API and command line of `operations` call."""

    def annotate(self, entries: Iterable[dict[str, Any]], *, now: datetime) -> None:
        """Add to each entry the reason for its wait."""
        wait_reasons.annotate(list(entries), now=now)

    def choose_waves(
        self, operation_id: UUID, choice: str, *, last_replicas: Sequence[str], actor: str, now: datetime
    ) -> None:
        """Continue or stop an upgrade in waves."""
        wave_requests.choose(operation_id, choice, last_replicas=last_replicas, actor=actor, now=now)

    def find_node(self, text: str) -> UUID:
        """Return the node with that name, id or id prefix."""
        from nodes.management import lookup

        return lookup.find_node(text).id


def register() -> None:
    """Register the kinds; `NodesConfig.ready` calls this."""
    kinds.register(
        NodeHooks(),
        OperationKind(
            load_request.KIND,
            "model",
            TaskType.STAGING,
            handler=_load,
            cancel=source_downloads.cancel_load,
            expires=True,
            attempt_keys=("setbacks", "engine_deaths"),
        ),
        OperationKind(unload_requests.UNLOAD_KIND, "model", TaskType.DELETION, handler=_unload),
        OperationKind(
            unload_requests.DELETE_KIND, "model", TaskType.DELETION, is_deletion=True, handler=_delete
        ),
        OperationKind(
            imports.KIND,
            "model",
            attempt_keys=(imports.STALLED_SINCE,),
            handler=_import,
            cancel=imports.cancel_import,
        ),
        OperationKind(unused_files.KIND, "", TaskType.DELETION, is_deletion=True, handler=_remove_files),
        OperationKind(
            drains.REMOVE_DEFINITION_KIND,
            "model",
            TaskType.DELETION,
            is_deletion=True,
            handler=_remove_definition,
        ),
        OperationKind(node_stop.KIND, "node", handler=lambda context: node_stop.StopNode(context.bus)),
        *(
            OperationKind(
                name, "node", handler=lambda _: bulk.RunOnNodes(), retry_identity=_identity_of_bulk_retry
            )
            for name in bulk.VERBS
        ),
        *(
            OperationKind(
                name, "backend", task_type, name == backend_requests.DELETE, targets=BackendTargets()
            )
            for name, task_type in _BACKEND_TASKS.items()
        ),
    )
