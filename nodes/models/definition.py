"""Model definitions that users, imports and galleries have saved, with their revisions.

A file of the models folder takes precedence over a row of the same name (`nodes/definitions/folder.py`). The
only writer is `nodes/definitions/store.py`. A deleted row stays until its name is used again: the operation
that deletes a definition may have been interrupted, and needs the list of its files.
"""

import uuid

from django.db import models
from django.db.models import Q

from localai_cluster.kit import clock


class DefinitionOrigin(models.TextChoices):
    """The way in which a definition was saved."""

    GALLERY = "gallery"
    IMPORT = "import"
    API = "api"
    EDITOR = "editor"


class ModelDefinition(models.Model):
    """A saved model definition; `text` is the YAML of its latest revision."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=255)
    text = models.TextField()
    origin = models.CharField(max_length=16, choices=DefinitionOrigin)
    revision = models.IntegerField(default=1)
    disabled = models.BooleanField(default=False)
    change = models.BigIntegerField(default=1)
    """Number of the row's last change. A reader with another number reads the row again."""
    files = models.JSONField(default=list)
    """Files that an import has fetched for the model: a list of `path`, `size`, `sha256` and `source`."""
    created_at = models.DateTimeField(default=clock.now)
    updated_at = models.DateTimeField(default=clock.now)
    deleted_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "model_definitions"
        verbose_name, verbose_name_plural = "model definition", "model definitions"
        constraints = [
            models.UniqueConstraint(
                name="definition_name_once", fields=["name"], condition=Q(deleted_at__isnull=True)
            ),
            models.CheckConstraint(name="definition_has_name", condition=~Q(name="")),
            models.CheckConstraint(name="definition_has_revision", condition=Q(revision__gte=1)),
        ]

    def __str__(self) -> str:
        return self.name


class DefinitionRevision(models.Model):
    """One revision of a definition's text."""

    definition = models.ForeignKey(ModelDefinition, on_delete=models.CASCADE, related_name="revisions")
    number = models.IntegerField()
    text = models.TextField()
    origin = models.CharField(max_length=16, choices=DefinitionOrigin)
    actor = models.CharField(max_length=150)
    reason = models.CharField(max_length=500, blank=True, default="")
    at = models.DateTimeField(default=clock.now)

    class Meta:
        db_table = "definition_revisions"
        verbose_name, verbose_name_plural = "revision of a definition", "revisions of definitions"
        constraints = [
            models.UniqueConstraint(name="definition_revision_once", fields=["definition", "number"])
        ]

    def __str__(self) -> str:
        return f"{self.definition}, revision {self.number}"
