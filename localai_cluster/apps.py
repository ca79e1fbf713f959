"""App configuration of the project package: loads the system checks."""

from django.apps import AppConfig


class ProjectConfig(AppConfig):
    """The project itself, so that its checks and management commands are found."""

    name = "localai_cluster"

    def ready(self) -> None:
        from localai_cluster import checks  # noqa: F401
