"""The bytes of models' files on nodes, and the nodes' disk quotas for them.

A load records the files of its model at its end (`BroughtModel`); until then the row of its replica holds
their bytes (`files_needed`). So two loads never count on the same bytes of a quota: each adds its row under
the node's lock. Replicas of one model share its files.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

from django.db import connection

from nodes.models import BackendNode, Phase
from nodes.placement.sizes import QUOTA_HINT, describe_quota

_READ = f"""
WITH files AS (
    SELECT node_id, model_name, max(size) AS size, max(staged) AS staged
      FROM (SELECT node_id, model_name, size, size AS staged FROM brought_models
             UNION ALL
            SELECT node_id, model_name, files_needed, 0 FROM node_models
             WHERE phase IN ('{Phase.RESERVED}', '{Phase.STAGING}') AND files_needed > 0) AS file
     WHERE (%(nodes)s::uuid[] IS NULL OR node_id = ANY(%(nodes)s))
       AND (model_name = ANY(%(models)s)
            OR node_id IN (SELECT id FROM backend_nodes WHERE disk_quota_bytes > 0))
     GROUP BY node_id, model_name)
SELECT node_id, model_name, size, staged FROM files WHERE model_name = ANY(%(models)s)
 UNION ALL
SELECT node_id, NULL, sum(size)::bigint, 0 FROM files
 WHERE node_id IN (SELECT id FROM backend_nodes WHERE disk_quota_bytes > 0) GROUP BY node_id
"""


class OverQuota(Exception):
    """The files do not fit into the node's disk quota; the text has the figures and what helps."""


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of one model's files on a node: those that are there, and with those that loads bring."""

    staged: int
    total: int


@dataclass(frozen=True)
class FileBytes:
    """The bytes of the models that were read, by model and node, and of all models on nodes with a quota."""

    models: Mapping[str, Mapping[UUID, ModelBytes]]
    totals: Mapping[UUID, int]

    def staged(self, model_name: str) -> dict[UUID, int]:
        """Return the bytes of the model's files on each node that has any."""
        return {id: size.staged for id, size in self.models[model_name].items() if size.staged}

    def others(self, model_name: str, node_ids: Collection[UUID]) -> dict[UUID, int]:
        """Return the bytes of all other models on those of these nodes that have a quota."""
        own = self.models[model_name]
        return {
            id: self.totals[id] - (own[id].total if id in own else 0) for id in node_ids if id in self.totals
        }


def read_file_bytes(model_names: Collection[str], node_ids: Collection[UUID] | None = None) -> FileBytes:
    """Read the bytes of the models' files on these nodes, None = all; one query."""
    models: dict[str, dict[UUID, ModelBytes]] = {name: {} for name in model_names}
    totals: dict[UUID, int] = {}
    parameters = {"models": list(models), "nodes": None if node_ids is None else list(node_ids)}
    with connection.cursor() as cursor:
        cursor.execute(_READ, parameters)
        for node_id, name, size, staged in cursor.fetchall():
            if name is None:
                totals[node_id] = size
            else:
                models[name][node_id] = ModelBytes(staged, size)
    return FileBytes(models, totals)


def check_quota(node: BackendNode, model_name: str, files: int) -> None:
    """Raise OverQuota unless so many bytes of the model's files fit. Needs the node's lock; one query."""
    quota = node.disk_quota_bytes
    if not quota or not files:
        return
    read = read_file_bytes([model_name], [node.pk])
    staged = read.staged(model_name).get(node.pk, 0)
    others = read.others(model_name, [node.pk]).get(node.pk, 0)
    if files > staged and others + files > quota:
        raise OverQuota(f"{describe_quota(others + staged, quota, files - staged)}; {QUOTA_HINT}")
