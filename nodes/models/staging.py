"""The hashes of files in the models folder, so that a file is read for it once."""

from django.db import models


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
