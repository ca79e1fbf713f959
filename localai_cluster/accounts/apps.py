"""App configuration of users, keys and sessions."""

from django.apps import AppConfig
from django.db.models.signals import post_save


class AccountsConfig(AppConfig):
    """Users, their keys and their sessions. The tables keep the names that they had in the app `nodes`."""

    name = "localai_cluster.accounts"

    def ready(self) -> None:
        """Audit the edits in the admin."""
        from django.contrib.admin.models import LogEntry

        from localai_cluster.accounts import audit

        post_save.connect(audit.record_admin_edit, sender=LogEntry, dispatch_uid="audit")
