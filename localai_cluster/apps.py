"""App configurations of the project package: its system checks, and the admin with our own site."""

from importlib import import_module

from django.apps import AppConfig
from django.conf import settings
from django.contrib.admin.apps import AdminConfig as DjangoAdminConfig
from django.contrib.admin.apps import SimpleAdminConfig


class ProjectConfig(AppConfig):
    """The project itself, so that its checks and management commands are found."""

    name = "localai_cluster"

    def ready(self) -> None:
        import_module("localai_cluster.checks")


class AdminConfig(DjangoAdminConfig):
    """Django's admin, entered through the product's own sign-in."""

    default_site = "localai_cluster.accounts.admin_site.Site"

    def ready(self) -> None:
        """Import the admin's pages, except in a process that shows none: they are megabytes."""
        if settings.IS_BACKGROUND:
            SimpleAdminConfig.ready(self)
        else:
            super().ready()
