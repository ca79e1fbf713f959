"""`manage.py bootstrap`: creates the first admin, enrols a node in advance, sets rules of scheduling.

Reads `CLUSTER_ADMIN_PASSWORD` and `CLUSTER_ENROL_NODE` with `CLUSTER_ENROL_SECRET` (each secret also as
`…_FILE`). A generated password (`CLUSTER_ADMIN_PASSWORD_GENERATED`) must be changed at the first sign-in.
Running it again changes nothing: an existing admin keeps password and permissions. But the rules of
`LOCALAI_MODEL_SCHEDULING` and `LOCALAI_MODEL_SCHEDULING_CONFIG` replace those of their models each time.

For `make run` it also makes a join token, each time, and writes the line that adds a machine to
`CLUSTER_JOIN_COMMAND_FILE`. If the data folder was copied (`CLUSTER_DATA_COPIED`), all nodes are offline
until their workers report here.
"""

import os
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction

from localai_cluster import join_script
from localai_cluster.accounts import actors
from localai_cluster.accounts.models import InitialPassword
from localai_cluster.embedded.preparation import PASSWORD_CHANGED_LINE
from localai_cluster.kit import clock, conf, errors, settings_table
from localai_cluster.kit.env import Environment
from localai_cluster.kit.files import replace_file
from nodes.registry import claims, identity, joining, lifecycle
from nodes.scheduling import rules, store
from nodes.scheduling.rules import Rule

ADMIN_NAME = "admin"
JOIN_TOKEN_USES = 10
"""Number of machines that may join with one join command of `make run`."""


def read_settings() -> tuple[settings_table.Bootstrap, list[Rule]]:
    """Read the settings and the scheduling rules. Raise CommandError, which names a wrong setting."""
    environment = Environment(os.environ)
    bootstrap, scheduling = environment.read(settings_table.Bootstrap), rules.rules_from_settings(environment)
    for problem in environment.problems:
        raise CommandError(f"{problem.setting}: {problem.message}. {problem.hint}")
    return bootstrap, scheduling


class Command(BaseCommand):
    """Creates the rows and secrets that a new installation needs before a user can sign in."""

    help = "Creates the admin user and enrols a node, as the environment says. Idempotent."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the option `--check`."""
        parser.add_argument("--check", action="store_true", help="only check the settings")

    def handle(self, *args: Any, **options: Any) -> None:
        """Create everything whose settings are present."""
        wanted, scheduling = read_settings()
        if options["check"]:
            return
        if wanted.copied:
            reason = "the data folder was copied; no worker has reported to this cluster yet"
            lifecycle.mark_all_silent(actor=actors.MAKE_RUN, now=clock.now(), reason=reason)
        self._admin(wanted.password, generated=wanted.generated)
        self._node(wanted.node, wanted.secret)
        if scheduling:
            self.stdout.write(f"scheduling rules set: {store.replace_rules(scheduling, clock.now())}")
        if wanted.join_command and (url := conf.cluster().public_url):
            self._join_command(Path(wanted.join_command), url)

    def _admin(self, password: str, *, generated: bool) -> None:
        users = get_user_model().objects
        if not password:
            return
        if admin := users.filter(username=ADMIN_NAME).first():
            # To compare passwords takes half a second, and a generated one that was changed has no row.
            is_initial = generated and InitialPassword.objects.filter(user=admin).exists()
            if not (is_initial or admin.check_password(password)):
                self.stdout.write(PASSWORD_CHANGED_LINE)
            return
        with transaction.atomic():
            user = users.create_superuser(username=ADMIN_NAME, email=None, password=password)
            if generated:
                InitialPassword.objects.create(user=user)
        self.stdout.write(f"user {ADMIN_NAME!r} created")

    def _node(self, name: str, secret: str) -> None:
        if not name:
            return
        if not secret:
            raise CommandError("CLUSTER_ENROL_NODE is set, but neither CLUSTER_ENROL_SECRET nor …_FILE is.")
        try:
            fingerprint = identity.check_node_secret(secret)
        except errors.InvalidInput as error:
            raise CommandError("CLUSTER_ENROL_SECRET must be 64 lower-case hex digits.") from error
        try:
            claims.enrol(name, fingerprint, actor=actors.MAKE_RUN, now=clock.now())
        except errors.ClusterError as refusal:
            raise CommandError(f"CLUSTER_ENROL_NODE: {refusal.message}") from refusal
        self.stdout.write(f"node {name!r} enrolled")

    @staticmethod
    def _join_command(path: Path, url: str) -> None:
        _, token = joining.make(actor=actors.MAKE_RUN, now=clock.now(), note="make run", uses=JOIN_TOKEN_USES)
        wheel = join_script.find_wheel(conf.cluster().wheel_dir)
        replace_file(path, join_script.join_command(url, token, wheel) + "\n")
