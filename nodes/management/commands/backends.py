"""`manage.py backends`: list, install, upgrade and delete backends.

Each command requests an operation as REST does, and follows it to its end. `--json` prints REST's response:
the ended operation, or with `--detach` the response to the request. If the operation fails, the command ends
with exit code 1 and the reasons by node.
"""

from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError

from localai_cluster.accounts import command_line
from localai_cluster.accounts.command_line import AddVerb, Argument, Columns, Options, VerbCommand
from localai_cluster.kit import errors
from localai_cluster.web.rest import validate
from nodes.api.cluster_backends import (
    ExternalSerializer,
    UpgradeSerializer,
    admit_command,
)
from nodes.api.installed import installed_rows
from nodes.api.node_backends import TEXTS_BY_KIND, backend_name_in, install_request
from nodes.backends import intents, upgrade_check
from nodes.backends.backend_requests import DELETE, UPGRADE, BackendRequest, RequestScope, select_all_nodes
from nodes.backends.installed import Upgrade
from nodes.management import lookup
from nodes.models import BackendNode, NodeModel
from operations.api.serializers import NodesSerializer, started_body
from operations.ledger.admission import Requester
from operations.management import following

_SHOWN_DIGEST_LENGTH = len("sha256:") + 12
_NODES: Argument = (
    "--node",
    {"action": "append", "default": [], "metavar": "NODE", "help": "only there: name or id; repeatable"},
)
_DETACH: Argument = ("--detach", {"action": "store_true", "help": "do not wait for its end"})
_NAME: Argument = ("name", {"metavar": "NAME"})


class Command(VerbCommand):
    """The command; its subcommands are the verbs."""

    help = "Shows the backends of the cluster, installs, upgrades and deletes them."

    def add_verbs(self, add: AddVerb) -> None:
        add(
            "list",
            list_backends,
            "List installed backends, the nodes that have them, and upgrades.",
            ("--upgrades", {"action": "store_true", "help": "only those with an upgrade"}),
        )
        _add_write_verbs(add)

    def explain(self, refusal: errors.ClusterError) -> str:
        """Return the refusal with the name of the command's option in place of the field of the body."""
        if refusal.field == "last_replicas" and (models := refusal.data.get("last_replicas")):
            options = " ".join(f"--confirm-last {model}" for model in models)
            return command_line.printable(
                f"the upgrade would stop the last replica of {', '.join(models)}; confirm with {options}"
            )
        if refusal.data.get("code") == "concrete_backend_requires_target":
            return f"{refusal.message} (--node chooses them)"
        return super().explain(refusal)


def _add_write_verbs(add: AddVerb) -> None:
    installer = add("install", install, "Install a backend on all nodes, or on some.", _NODES, _DETACH)
    installer.add_argument(
        "name", nargs="?", default="", metavar="NAME", help="of a gallery, or gallery@name"
    )
    installer.add_argument(
        "--uri", default="", help="address of an image, archive or folder instead of a gallery"
    )
    installer.add_argument("--name", dest="called", default="", metavar="N", help="its name, with --uri")
    installer.add_argument("--force", action="store_true", help="replace the files where it is installed")
    installer.add_argument("--yes", action="store_true", help="with --force: do not ask")
    described = "Upgrade a backend where it is; several nodes go in waves."
    newer = add("upgrade", upgrade, described, _NODES, _DETACH, _NAME)
    pace = newer.add_mutually_exclusive_group()
    pace.add_argument("--at-once", action="store_true", help="on all nodes at once: running requests end")
    pace.add_argument(
        "--max-unavailable",
        type=_parse_wave_size,
        metavar="N",
        help="nodes at a time after the canary, or 25%%",
    )
    newer.add_argument("--pause", type=int, metavar="SECONDS", help="pause between two waves")
    newer.add_argument(
        "--stop-at-failures", type=int, metavar="N", help="failed nodes from which on it asks (default: 1)"
    )
    option, settings = following.CONFIRM_LAST
    newer.add_argument(option, **settings)
    yes = ("--yes", {"action": "store_true", "help": "do not ask"})
    add("delete", delete, "Delete a backend where it is; its engines stop.", _NODES, _DETACH, _NAME, yes)


def list_backends(options: Options) -> str:
    picture = upgrade_check.read_overview()
    backends = [
        backend for backend in picture.backends if not options["upgrades"] or backend.name in picture.upgrades
    ]
    if options["json"]:
        return command_line.as_json(installed_rows(upgrade_check.UpgradeOverview(backends, picture.upgrades)))
    columns: Columns = {
        "NAME": "name",
        "VERSION": lambda backend: "system" if backend.is_system else backend.majority.version,
        "DIGEST": lambda backend: backend.majority.digest[:_SHOWN_DIGEST_LENGTH],
        "NODES": lambda backend: len(backend.places),
        "OTHER BUILD ON": lambda backend: ", ".join(place.node["node_name"] for place in backend.drifted),
        "UPGRADE": lambda backend: _upgrade_text(picture.upgrades.get(backend.name)),
    }
    return command_line.format_table(columns, backends) if backends else "no backends"


def _upgrade_text(upgrade: Upgrade | None) -> str:
    """Return the available version, else its digest, else a text that the nodes have different builds."""
    if upgrade is None:
        return ""
    return upgrade.available_version or upgrade.available_digest[:_SHOWN_DIGEST_LENGTH] or "available"


def install(options: Options) -> str:
    name, called, uri = options["name"], options["called"], options["uri"]
    if called and not uri:
        raise CommandError("--name is for --uri; the name of a gallery's backend is the argument NAME")
    if called and name:
        raise CommandError("give the name once: as NAME or with --name")
    body = {"uri": uri, "name": called or name} if uri else {"backend": name}
    fields = validate(ExternalSerializer, body | _nodes_field(_selected_nodes(options)))
    if not (name or uri):
        raise CommandError(
            "give the NAME of a backend, or --uri; `GET /api/backends` lists what galleries offer"
        )
    request, nodes = install_request(fields, force=options["force"]), _selected_nodes(options)
    if options["force"] and not options["yes"]:
        nodes = nodes or select_all_nodes(request)[0]
        if NodeModel.objects.loaded().filter(node__in=nodes).of_backend(request.backend).exists():
            _confirm("reinstall", request, nodes)
    return _run_operation(options, request, fields)


def _parse_wave_size(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def upgrade(options: Options) -> str:
    """Upgrade a backend, in waves if there are several nodes or a wave option."""
    request = BackendRequest(UPGRADE, backend_name_in(options["name"]))
    nodes = _selected_nodes(options)
    confirmed = options["confirm_last"]
    names = {
        "max_unavailable": "max_unavailable",
        "pause": "pause_seconds",
        "stop_at_failures": "stop_at_failures",
    }
    waves = {field: options[name] for name, field in names.items() if options[name] is not None}
    several = len(nodes or select_all_nodes(request)[0]) > 1
    body: dict[str, Any] = {"last_replicas": confirmed} if confirmed else {}
    if not options["at_once"] and (several or waves or confirmed):
        body["waves"] = waves
    elif confirmed or waves:
        raise CommandError("--confirm-last, --pause and --stop-at-failures apply to waves, not to --at-once")
    return _run_operation(options, request, validate(UpgradeSerializer, body | _nodes_field(nodes)))


def delete(options: Options) -> str:
    request = BackendRequest(DELETE, backend_name_in(options["name"]))
    nodes = _selected_nodes(options)
    if not options["yes"]:
        _confirm("delete", request, nodes or select_all_nodes(request)[0])
    return _run_operation(options, request, validate(NodesSerializer, _nodes_field(nodes)))


def _confirm(verb: str, request: BackendRequest, nodes: Sequence[BackendNode]) -> None:
    """Show replicas, requests and active operations, and ask for confirmation. Raise CommandError on "no"."""
    names = ", ".join(node.name for node in nodes) or "no node"
    stops = NodeModel.objects.loaded().filter(node__in=nodes).of_backend(request.backend)
    stopped = stops.order_by("model_name", "node__name").values_list("model_name", "node__name", "in_flight")
    replicas = ", ".join(f"{model} on {node}" for model, node, _ in stopped)
    question = f"{verb.capitalize()} {request.backend} {'from' if verb == 'delete' else 'on'} {names}."
    if replicas:
        question += f" This stops {replicas}; requests in flight: {sum(busy for *_, busy in stopped)}."
    if pending := intents.count_pending_by_backend().get(request.backend.lower()):
        question += f" Operations pending on it: {pending}."
    command_line.confirm(f"{verb} {request.backend}", question)


def _selected_nodes(options: Options) -> list[BackendNode]:
    return [lookup.find_node(text) for text in options["node"]]


def _nodes_field(nodes: Sequence[BackendNode]) -> dict[str, Any]:
    return {"nodes": [str(node.id) for node in nodes]} if nodes else {}


def _run_operation(options: Options, request: BackendRequest, fields: dict[str, Any]) -> str:
    """Create or join the operation, and follow it to its end."""
    result = admit_command(RequestScope((), by=Requester(str(command_line.current_actor()))), request, fields)
    body, id = started_body(result, TEXTS_BY_KIND[request.kind]), result.operation.id
    if not options["detach"] and not options["json"]:
        options["out"].write(f"{body['message']}: operation {id}")
    return following.follow_unless_detached(options, id, body["message"], body)
