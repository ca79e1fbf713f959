"""App configuration of users, keys and sessions."""

from django.apps import AppConfig
from django.db.models.signals import post_save


class AccountsConfig(AppConfig):
    """App of users, API keys and sessions. Its tables have the names that they had in the app `nodes`."""

    name = "localai_cluster.accounts"

    def ready(self) -> None:
        """Register the receiver that audits edits in Django's admin."""
        from django.contrib.admin.models import LogEntry

        from localai_cluster.accounts import audit

        post_save.connect(audit.record_admin_edit, sender=LogEntry, dispatch_uid="audit")
