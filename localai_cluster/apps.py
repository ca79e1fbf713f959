"""App configurations of the project package: its system checks, and the admin with our own site."""

from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig as DjangoAdminConfig


class ProjectConfig(AppConfig):
    """The project itself, so that its checks and management commands are found."""

    name = "localai_cluster"

    def ready(self) -> None:
        from localai_cluster import checks  # noqa: F401


class AdminConfig(DjangoAdminConfig):
    """Django's admin, entered through the product's own sign-in."""

    default_site = "localai_cluster.accounts.admin_site.Site"
