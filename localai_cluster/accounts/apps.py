"""App configuration of users, keys and sessions."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """People and programs that call. The tables keep the names that they had in the app `nodes`."""

    name = "localai_cluster.accounts"
