"""App configurations of the project package (system checks, TimestampLoader) and of the admin."""

# Django carries no types for psycopg's loaders.
# mypy: disallow-subclassing-any=false

from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.contrib.admin.apps import AdminConfig as DjangoAdminConfig
from django.contrib.admin.apps import SimpleAdminConfig
from django.db.backends.postgresql.psycopg_any import BaseTzLoader, get_adapters_template


class TimestampLoader(BaseTzLoader):
    """Loads `timestamptz` of connections in UTC in a tenth of the time of Django's loader.

    Rows of nodes and targets have up to ten times, and Django's loader took a third of the time to read them.
    """

    timezone = UTC

    def load(self, data: Any) -> datetime:
        """Return the time. Raise DataError if Python cannot represent it."""
        try:
            return datetime.fromisoformat(str(data, "ascii"))
        except ValueError:
            loaded: datetime = super().load(data)
            return loaded


class ProjectConfig(AppConfig):
    """App of the project itself, so that Django finds its checks and management commands."""

    name = "localai_cluster"

    def ready(self) -> None:
        import_module("localai_cluster.checks")
        get_adapters_template(settings.USE_TZ, UTC).register_loader("timestamptz", TimestampLoader)


class AdminConfig(DjangoAdminConfig):
    """Django's admin with the product's own site and sign-in."""

    default_site = "localai_cluster.accounts.admin_site.Site"

    def ready(self) -> None:
        """Import the admin's pages, except in processes that serve none: the pages take megabytes."""
        if settings.IS_BACKGROUND:
            SimpleAdminConfig.ready(self)
        else:
            super().ready()
