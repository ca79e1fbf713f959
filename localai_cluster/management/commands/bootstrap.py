"""`manage.py bootstrap`: creates the first admin, enrols a node in advance, sets rules of scheduling.

Reads `CLUSTER_ADMIN_PASSWORD` and `CLUSTER_ENROL_NODE` with `CLUSTER_ENROL_SECRET` (each secret also as
`…_FILE`). A generated password (`CLUSTER_ADMIN_PASSWORD_GENERATED`) must be changed at the first sign-in.
A second run changes nothing: an existing admin keeps password and permissions. But the rules of
`LOCALAI_MODEL_SCHEDULING` and `LOCALAI_MODEL_SCHEDULING_CONFIG` replace those of their models in each run.
For `make run` each run also creates a join token, and writes the line that adds a machine to
`CLUSTER_JOIN_COMMAND_FILE`.
"""

import os
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from localai_cluster import clock, conf, errors, join_script
from localai_cluster.accounts import actors
from localai_cluster.accounts.models import InitialPassword
from localai_cluster.embedded.resources import write_private
from localai_cluster.env import Environment
from nodes.registry import identity, joining, services
from nodes.scheduling import boot, store

ADMIN = "admin"
JOINING = 10
"""Machines that may join with the line that `make run` prints."""


class Command(BaseCommand):
    """Creates what a new installation needs before anyone can sign in."""

    help = "Creates the admin user and enrols a node, as the environment says. Idempotent."

    def handle(self, *args: Any, **options: Any) -> None:
        """Does all of it; skips a part whose settings are missing."""
        environment = Environment(os.environ)
        password = environment.secret("CLUSTER_ADMIN_PASSWORD")
        generated = environment.boolean("CLUSTER_ADMIN_PASSWORD_GENERATED")
        node, secret = environment.text("CLUSTER_ENROL_NODE"), environment.secret("CLUSTER_ENROL_SECRET")
        join_command = environment.text("CLUSTER_JOIN_COMMAND_FILE")
        rules = boot.read(environment)
        for problem in environment.problems:
            raise CommandError(f"{problem.setting}: {problem.message}. {problem.hint}")
        self._admin(password, generated=generated)
        self._node(node, secret)
        if rules:
            self.stdout.write(f"scheduling rules set: {store.replace(rules, clock.now())}")
        if join_command and (url := conf.cluster().public_url):
            self._join_command(Path(join_command), url)

    def _admin(self, password: str, *, generated: bool) -> None:
        users = get_user_model().objects
        if not password or users.filter(username=ADMIN).exists():
            return
        with transaction.atomic():
            user = users.create_superuser(username=ADMIN, email=None, password=password)
            if generated:
                InitialPassword.objects.create(user=user)
        self.stdout.write(f"user {ADMIN!r} created")

    def _node(self, name: str, secret: str) -> None:
        if not name:
            return
        if not secret:
            raise CommandError("CLUSTER_ENROL_NODE is set, but neither CLUSTER_ENROL_SECRET nor …_FILE is.")
        try:
            fingerprint = identity.check_node_secret(secret)
        except errors.InvalidInput as error:
            raise CommandError("CLUSTER_ENROL_SECRET must be 64 lower-case hex digits.") from error
        services.enrol(name, fingerprint, actor=actors.MAKE_RUN, now=clock.now())
        self.stdout.write(f"node {name!r} enrolled")

    @staticmethod
    def _join_command(path: Path, url: str) -> None:
        _, token = joining.make(actor=actors.MAKE_RUN, now=clock.now(), note="make run", uses=JOINING)
        write_private(path, join_script.command(url, token) + "\n")
