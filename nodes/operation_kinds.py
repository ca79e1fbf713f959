"""The kinds of operations on nodes, models and backends, as `operations` runs them.

What only a controller needs, and takes long to import, is imported where its handler is made.
"""

from collections.abc import Sequence
from datetime import datetime
from uuid import UUID

from localai_cluster.kit import conf
from nodes.backends import admission, backend_requests, node_stop, wait_reasons, wave_requests
from nodes.downloads import imports, unused_files
from nodes.loading import definition_removal, load_request, source_downloads
from nodes.registry import bulk
from nodes.replicas import drains, unload_requests
from operations import kinds
from operations.executor.work import Handler
from operations.kinds import HandlerContext, OperationKind
from operations.ledger.admission import Admission, Requester
from operations.models import Operation, TaskType


class BackendTargets:
    """Operations on backends: each target is an intent of its node."""

    cancel = staticmethod(admission.cancel)

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


def _import(context: HandlerContext) -> Handler:
    from nodes.sources.opening import SourceFileOpener

    return imports.ImportModel(SourceFileOpener(conf.cluster()))


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

    annotate = staticmethod(wait_reasons.annotate)
    choose_waves = staticmethod(wave_requests.choose)

    def find_node(self, text: str) -> UUID:
        """Return the node with that name, id or id prefix."""
        from nodes.management import lookup

        return lookup.find_node(text).id


_KINDS = (
    OperationKind(
        load_request.KIND,
        "model",
        TaskType.STAGING,
        handler=_load,
        cancel=source_downloads.cancel_load,
        expires=True,
        attempt_keys=("setbacks", "engine_deaths"),
    ),
    OperationKind(
        unload_requests.UNLOAD_KIND,
        "model",
        TaskType.DELETION,
        handler=lambda context: unload_requests.UnloadModel(context.bus),
    ),
    OperationKind(
        unload_requests.DELETE_KIND,
        "model",
        TaskType.DELETION,
        is_deletion=True,
        handler=lambda context: unload_requests.DeleteModel(context.bus),
    ),
    OperationKind(
        imports.KIND,
        "model",
        attempt_keys=(imports.STALLED_SINCE,),
        handler=_import,
        cancel=imports.cancel_import,
    ),
    OperationKind(
        unused_files.KIND,
        "",
        TaskType.DELETION,
        is_deletion=True,
        handler=lambda _: unused_files.RemoveFiles(),
    ),
    OperationKind(
        drains.REMOVE_DEFINITION_KIND,
        "model",
        TaskType.DELETION,
        is_deletion=True,
        handler=lambda context: definition_removal.RemoveDefinition(context.bus),
    ),
    OperationKind(node_stop.KIND, "node", handler=lambda context: node_stop.StopNode(context.bus)),
    *(
        OperationKind(
            name, "node", handler=lambda _: bulk.RunOnNodes(), retry_identity=_identity_of_bulk_retry
        )
        for name in bulk.VERBS
    ),
    *(
        OperationKind(name, "backend", task_type, name == backend_requests.DELETE, targets=BackendTargets())
        for name, task_type in _BACKEND_TASKS.items()
    ),
)


def register() -> None:
    """Register the kinds; `NodesConfig.ready` calls this."""
    kinds.register(NodeHooks(), *_KINDS)
