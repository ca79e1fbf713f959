"""What is installed where: the last list that each worker gave of its backends.

Kept so that a page about five hundred nodes asks no worker. `BackendNode.inventory_at` says as of when a
node's rows are true; `nodes/backends/inventory.py` brings them up to date.
"""

from typing import Self

from django.db import models
from django.db.models import Q

from nodes.models.node import BackendNode


class NodeBackendQuerySet(models.QuerySet["NodeBackend"]):
    """Adjectives of what is installed."""

    def named(self, name: str) -> Self:
        """What this name starts, or an alias of it."""
        return self.filter(Q(name__iexact=name) | Q(alias__iexact=name))


class NodeBackend(models.Model):
    """One backend on one node, as its worker listed it (`contract/http-api.md` §2.10)."""

    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="backends")
    name = models.CharField(max_length=255)
    is_system = models.BooleanField(default=False)
    is_meta = models.BooleanField(default=False)
    installed_at = models.CharField(max_length=64, blank=True, default="")
    gallery_url = models.CharField(max_length=2048, blank=True, default="")
    version = models.CharField(max_length=255, blank=True, default="")
    uri = models.CharField(max_length=2048, blank=True, default="")
    digest = models.CharField(max_length=255, blank=True, default="")
    alias = models.CharField(max_length=255, blank=True, default="", help_text="another name that starts it")

    objects = NodeBackendQuerySet.as_manager()

    class Meta:
        db_table = "node_backends"
        verbose_name, verbose_name_plural = "installed backend", "installed backends"
        ordering = ("name",)
        constraints = [models.UniqueConstraint(name="backend_once_a_node", fields=["node", "name"])]
        indexes = [models.Index(fields=["name"], name="node_backend_name")]

    def __str__(self) -> str:
        return self.name
