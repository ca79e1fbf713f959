"""App configuration of the ledger."""

from django.apps import AppConfig


class OperationsConfig(AppConfig):
    """Operations and their history."""

    name = "operations"
