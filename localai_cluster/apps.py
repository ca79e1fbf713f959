"""App configurations of the project package: its system checks, and the admin with our own site."""

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

    Rows of nodes and targets have up to ten times: those were a third of the time in which they were read.
    """

    timezone = UTC

    def load(self, data: Any) -> datetime:
        """Return the time; raise DataError if Python has no such time."""
        try:
            return datetime.fromisoformat(str(data, "ascii"))
        except ValueError:
            loaded: datetime = super().load(data)
            return loaded


class ProjectConfig(AppConfig):
    """The project itself, so that its checks and management commands are found."""

    name = "localai_cluster"

    def ready(self) -> None:
        import_module("localai_cluster.checks")
        get_adapters_template(settings.USE_TZ, UTC).register_loader("timestamptz", TimestampLoader)


class AdminConfig(DjangoAdminConfig):
    """Django's admin, entered through the product's own sign-in."""

    default_site = "localai_cluster.accounts.admin_site.Site"

    def ready(self) -> None:
        """Import the admin's pages, except in a process that shows none: they are megabytes."""
        if settings.IS_BACKGROUND:
            SimpleAdminConfig.ready(self)
        else:
            super().ready()
