"""Files on their way to nodes: hashes of those in the models folder, and how much of a model a node has."""

from django.db import models

from nodes.models.node import BackendNode


class FileHash(models.Model):
    """The SHA-256 of one file as it was; another file under its name has another stamp."""

    id = models.BigAutoField(primary_key=True)
    path = models.CharField(max_length=1024, unique=True, help_text="in the models folder")
    stamp = models.CharField(max_length=120, help_text="size, times and inode when it was read")
    sha256 = models.CharField(max_length=64)
    hashed_at = models.DateTimeField()

    class Meta:
        db_table = "file_hashes"
        verbose_name, verbose_name_plural = "file hash", "file hashes"
        indexes = [models.Index(fields=["hashed_at"], name="hash_by_time")]

    def __str__(self) -> str:
        return self.path


class BroughtModel(models.Model):
    """How much of a model's files a node has, as the last load that brought them found or left it."""

    id = models.BigAutoField(primary_key=True)
    node = models.ForeignKey(BackendNode, on_delete=models.CASCADE, related_name="brought_models")
    model_name = models.CharField(max_length=255)
    size = models.PositiveBigIntegerField(help_text="bytes")
    seen_at = models.DateTimeField()

    class Meta:
        db_table = "brought_models"
        verbose_name, verbose_name_plural = "model on a node's disk", "models on nodes' disks"
        constraints = [models.UniqueConstraint(fields=["model_name", "node"], name="brought_once_a_node")]

    def __str__(self) -> str:
        return f"{self.model_name} on {self.node_id}"
