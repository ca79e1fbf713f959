"""App configuration of the fleet."""

from django.apps import AppConfig


class NodesConfig(AppConfig):
    """Nodes, their models and how requests get there."""

    name = "nodes"
