"""What the upgrade check knows: the galleries' side of every installed backend, and how the check stands.

The rows of `NodeBackend` are the other side. Readers compare the two when they are asked, so all web
processes say the same, and a badge goes with the row that made it. `nodes/backends/upgrade_state.py` is the
only writer, but for the two columns of automatic upgrades (`automatic.py`).
"""

from django.db import models


class BackendOffer(models.Model):
    """What the galleries offer under the name of an installed backend (R6.34)."""

    name = models.CharField(max_length=255, primary_key=True, help_text="as `gallery_index.folded` has it")
    version = models.CharField(max_length=255, blank=True, default="")
    uri = models.CharField(max_length=2048, blank=True, default="")
    digest = models.CharField(
        max_length=255, blank=True, default="", help_text="of an image, by its registry"
    )
    builds = models.JSONField(default=list, help_text="digests of the image's builds for single platforms")
    automatic_to = models.CharField(
        max_length=255, blank=True, default="", help_text="version or digest of the last automatic upgrade"
    )
    automatic_nodes = models.JSONField(
        default=list,
        help_text="nodes that an automatic upgrade to it was made for, or that it left to people",
    )

    class Meta:
        db_table = "backend_offers"
        verbose_name, verbose_name_plural = "backend offer", "backend offers"
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class UpgradeCheck(models.Model):
    """The one row of the upgrade check.

    It is due while `asked` is ahead of `answered`: requests during a check become one more check. `revision`
    moves with every change of what is installed or offered.
    """

    ONLY = 1

    id = models.PositiveSmallIntegerField(primary_key=True, default=ONLY)
    revision = models.BigIntegerField(default=0)
    asked = models.BigIntegerField(default=0)
    answered = models.BigIntegerField(default=0)
    followed = models.BigIntegerField(default=0)
    """The request up to which automatic upgrades were made of what the checks have found."""
    claimed_by = models.CharField(max_length=64, blank=True, default="")
    claimed_until = models.DateTimeField(null=True, blank=True)
    checked_at = models.DateTimeField(null=True, blank=True)
    problems = models.JSONField(default=dict, help_text="galleries that could not be read, and why")
    galleries = models.CharField(
        max_length=64, blank=True, default="", help_text="fingerprint of what was read"
    )

    class Meta:
        db_table = "upgrade_check"
        verbose_name, verbose_name_plural = "upgrade check", "upgrade check"
        constraints = [models.CheckConstraint(name="one_upgrade_check", condition=models.Q(id=1))]

    def __str__(self) -> str:
        return f"asked {self.asked}, answered {self.answered}"
