"""App configuration of the fleet."""

from django.apps import AppConfig


class NodesConfig(AppConfig):
    """Nodes, their models and how requests get there."""

    name = "nodes"

    def ready(self) -> None:
        """Register the kinds of operations."""
        from nodes import operation_kinds

        operation_kinds.register()
