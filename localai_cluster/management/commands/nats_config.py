"""`manage.py nats_config FOLDER`: keys and configuration for a NATS server of your own.

Everything in the folder is secret (mode 0600). Keys and accounts are created once: a second run changes only
`nats.conf`. The accounts contain the revocations that a controller has pushed.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from localai_cluster.embedded.nats import BusKeys
from localai_cluster.embedded.resources import SetupError, private_directory
from localai_cluster.embedded.secrets import ensure_secret
from localai_cluster.kit.files import replace_file
from localai_cluster.kit.nkeys import Role

MAX_PORT = 65535
_SEEDS: dict[str, tuple[Role, str]] = {
    "operator": ("operator", "CLUSTER_NATS_OPERATOR_SEED_FILE"),
    "system": ("account", "CLUSTER_NATS_SYSTEM_SEED_FILE"),
    "account": ("account", "LOCALAI_NATS_ACCOUNT_SEED_FILE"),
}


class Command(BaseCommand):
    """Writes the files, and prints the settings that refer to them."""

    help = "Makes the keys of a NATS server and writes its configuration."
    # It creates files that the settings need, so it must run before they are complete.
    requires_system_checks = ()

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the folder for the files, and the path of that folder on the NATS server's machine."""
        parser.add_argument("folder", type=Path, help="a folder that only the operator can read")
        parser.add_argument("--seen-as", type=Path, help="the same folder as the NATS server sees it")
        parser.add_argument("--host", default="0.0.0.0", help="the address on which it listens")
        parser.add_argument("--port", type=int, default=4222, help="the port on which it listens")
        parser.add_argument("--tls-cert", type=Path, help="its certificate (PEM)")
        parser.add_argument("--tls-key", type=Path, help="the key of that certificate (PEM)")
        parser.add_argument("--tls-ca", type=Path, help="demands client certificates of this CA (PEM)")

    def handle(self, *args: Any, folder: Path, **options: Any) -> None:
        """Write the files. Raise CommandError if the folder cannot be used."""
        if bool(options["tls_cert"]) != bool(options["tls_key"]):
            raise CommandError("--tls-cert and --tls-key go together")
        if options["tls_ca"] and not options["tls_cert"]:
            raise CommandError("--tls-ca needs --tls-cert and --tls-key: without them there is no TLS")
        if not 1 <= options["port"] <= MAX_PORT:
            raise CommandError(f"--port must be from 1 to {MAX_PORT}")
        folder = folder.absolute()
        try:
            private_directory(folder)
            seeds = {name: ensure_secret(folder / f"{name}.seed", role) for name, (role, _) in _SEEDS.items()}
            keys = BusKeys.of(seeds["operator"], seeds["system"], seeds["account"])
            keys.write_accounts(folder / "accounts")
            server_folder = options["seen_as"] or folder
            configuration = {
                "host": options["host"],
                "port": options["port"],
                **keys.configuration(server_folder / "accounts"),
                **_tls(options),
            }
            replace_file(folder / "nats.conf", json.dumps(configuration, indent=1) + "\n")
        except (OSError, ValueError, SetupError) as error:
            raise CommandError(f"cannot use {folder}: {error}") from error
        self.stdout.write(f"nats-server --config {server_folder / 'nats.conf'}")
        for name, (_, variable) in _SEEDS.items():
            self.stdout.write(f"{variable}={folder / f'{name}.seed'}")


def _tls(options: dict[str, Any]) -> dict[str, Any]:
    if not options["tls_cert"]:
        return {}
    tls: dict[str, Any] = {"cert_file": str(options["tls_cert"]), "key_file": str(options["tls_key"])}
    if options["tls_ca"]:
        tls |= {"ca_file": str(options["tls_ca"]), "verify": True}
    return {"tls": tls}
