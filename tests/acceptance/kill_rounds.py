"""The rounds of the kill sweep: for each point, who is killed there and how it comes to pass it."""

from collections.abc import Iterator
from typing import Any

from tests.acceptance import kill_deeds as do
from tests.acceptance import kill_file_deeds as files
from tests.acceptance.kill_sweep import Deed, Round, nothing

CONTROLLER, WEB, TASKS, WORKER = "controller", "web", "tasks", "worker"
COMMIT, QUESTION, MESSAGE = (":before", ":committed"), (":before", ":sent", ":answered"), (":before", ":sent")
PULL = (":layer", ":layer@2", ":complete")
DOWNLOAD = (":piece", ":piece@2", ":verified", ":published")
SWAP = (":staged", ":set_aside", ":swapped")
FETCH = (":verified", ":moved")
CANCEL = (":download", *COMMIT)


def _each(
    point: str, kinds: tuple[str, ...], victim: str, what: str, act: Deed = nothing, **more: Any
) -> Iterator[Round]:
    for kind in kinds:
        yield Round(point + kind, victim, what, act, **more)


OUT_OF_REACH: dict[str, str] = {}
"""Points without a round, because no process calls their function; a test sees to it that none does."""


def rounds() -> list[Round]:
    """All of them."""
    return [*on_simulated_workers(), *on_a_real_worker()]


def on_a_real_worker() -> list[Round]:
    """What needs engines and a disk."""
    return [*loads(), *on_disk()]


def loads() -> list[Round]:
    """Cold loads."""
    cancelled: dict[str, Any] = {"again": do.cancel, "outcome": "cancelled", "also": "completed"}
    returns: dict[str, Any] = {"first": do.away, "again": do.again}
    return [
        *_each("ledger.admit", COMMIT, WEB, "load", do.load_by, again=do.again),
        *_each("ledger.need", COMMIT, WEB, "second request", do.joined_by, again=do.again),
        *_each("load.cancel", COMMIT, WEB, "cancel a load", do.load_cancelled_by, **cancelled),
        *_each("ledger.claim", COMMIT, CONTROLLER, "load", do.load),
        *_each("load.reserve", COMMIT, CONTROLLER, "load", do.load),
        *_each("load.staging", COMMIT, CONTROLLER, "load of a file", do.load_of_a_file),
        *_each("load.staged", COMMIT, CONTROLLER, "load of a file", do.load_of_a_file),
        *_each("load.start", COMMIT, CONTROLLER, "load", do.load),
        *_each("load.answer", COMMIT, CONTROLLER, "load", do.load),
        *_each("load.publish", COMMIT, CONTROLLER, "load", do.load),
        *_each("load.learn", COMMIT, CONTROLLER, "load", do.load),
        *_each("ledger.renew", COMMIT, CONTROLLER, "load", do.load),
        *_each("ledger.progress", COMMIT, CONTROLLER, "load", do.load),
        *_each("ledger.finish", COMMIT, CONTROLLER, "load", do.load),
        *_each("ledger.release", COMMIT, CONTROLLER, "stop while loading", do.stopped_load),
        *_each("ledger.reap", COMMIT, CONTROLLER, "lease run out", first=do.abandoned_load, early=True),
        *_each("load.ended", COMMIT, CONTROLLER, "failed load", do.failing_load, outcome="failed"),
        *_each(
            "ledger.admit",
            COMMIT,
            WEB,
            "retry a failed load",
            do.failed_load_retried_by,
            again=do.retry,
            outcome="failed",
        ),
        *_each("load.abandoned", COMMIT, CONTROLLER, "lease run out", first=do.abandoned_load, early=True),
        *_each("model.stop", QUESTION, CONTROLLER, "failed load", do.failing_load, outcome="failed"),
        *_each("ledger.put_back", COMMIT, CONTROLLER, "no node", do.load, first=do.away, again=do.back),
        *_each("ledger.wake", COMMIT, CONTROLLER, "node is back", do.back_for_a_load, **returns),
    ]


def on_disk() -> list[Round]:
    """What a worker writes to its disk, and its answers."""
    delete: dict[str, Any] = {"first": do.with_files, "again": do.retry_real}
    whole: dict[str, Any] = {"first": files.import_for_workers, "again": files.downloaded}
    here: dict[str, Any] = {"first": files.import_unreached, "again": files.downloaded_here}
    both: dict[str, Any] = {
        "first": files.import_unreached,
        "again": files.download_cancelled,
        "outcome": "cancelled",
        "also": "completed",
    }
    return [
        *_each("worker.install", SWAP, WORKER, "upgrade", do.real_upgrade, again=do.retry_real),
        *_each("worker.pull", PULL, WORKER, "install an image", do.real_pull, again=do.retry_pull),
        Round("worker.command:done", WORKER, "upgrade", do.real_upgrade, again=do.retry_real),
        *_each("bus.reply", MESSAGE, WORKER, "upgrade", do.real_upgrade, again=do.retry_real),
        *_each("worker.fetch", FETCH, WORKER, "load, file from its source", do.again, **whole),
        *_each("download", DOWNLOAD, CONTROLLER, "load, file not for its worker", do.again, **here),
        *_each("ledger.admit", COMMIT, CONTROLLER, "load, file not for its worker", do.again, **here),
        *_each(
            "load.cancel",
            CANCEL,
            WEB,
            "cancel a load that downloads",
            files.downloading_load_cancelled_by,
            **both,
        ),
        *_each("worker.delete", (":stopped", ":removed"), WORKER, "delete", do.real_delete, **delete),
    ]


def on_simulated_workers() -> list[Round]:
    """Commands on several nodes."""
    return [*of_models(), *of_files(), *asked(), *left_behind(), *in_turn(), *carried_out(), *sent()]


def asked() -> list[Round]:
    """What a web process does when somebody asks."""
    return [
        *_each("backends.ask", COMMIT, WEB, "install", do.install_by, again=do.install),
        *_each(
            "backends.cancel", COMMIT, WEB, "cancel", do.cancelled_by, again=do.cancel, outcome="cancelled"
        ),
        *_each("backends.retry", COMMIT, WEB, "retry", do.retried_by, again=do.retry),
        *_each("ledger.dismiss", COMMIT, WEB, "dismiss", do.dismissed_by, again=do.dismiss, outcome="failed"),
        *_each(
            "ledger.dismiss_many",
            COMMIT,
            WEB,
            "dismiss",
            do.selected_by,
            again=do.dismiss_many,
            outcome="failed",
        ),
        *_each("ledger.clear", COMMIT, WEB, "clear the record", do.cleared_by, forgets=True),
        *_each("waves.decide", COMMIT, WEB, "continue", do.chosen_by, again=do.choose, outcome="failed"),
    ]


def carried_out() -> list[Round]:
    """Intents, from their claim to their end."""
    overdue = (("LOCALAI_NATS_BACKEND_INSTALL_TIMEOUT", "1s"),)
    dead = "the tenth attempt fails"
    cut: dict[str, Any] = {"again": do.bus_again, "outcome": "cancelled"}
    return [
        *_each("intents.claim", COMMIT, CONTROLLER, "install", do.install),
        *_each("intents.renew", COMMIT, CONTROLLER, "install", do.slow_install),
        *_each("ledger.happen", COMMIT, CONTROLLER, "install, progress", do.install),
        *_each("intents.settle", COMMIT, CONTROLLER, "install", do.install),
        *_each("intents.settle", COMMIT, CONTROLLER, "upgrade", do.upgrade),
        *_each("intents.settle", COMMIT, CONTROLLER, "delete", do.delete),
        *_each("intents.settle", COMMIT, CONTROLLER, "refused", do.refused_install, outcome="failed"),
        *_each("intents.settle", COMMIT, CONTROLLER, "worker restarted", do.interrupted, again=do.retry),
        Round("intents.settle:before", CONTROLLER, dead, do.last_attempt),
        Round("intents.settle:committed", CONTROLLER, dead, do.last_attempt, outcome="failed"),
        *_each("intents.overdue", COMMIT, CONTROLLER, "over the time limit", do.slow_install, env=overdue),
        *_each("intents.called_off", COMMIT, CONTROLLER, "cancel", do.cancelled_install, outcome="cancelled"),
        *_each("intents.call_off_later", COMMIT, CONTROLLER, "bus cut", do.cancelled_without_the_bus, **cut),
        *_each("intents.release", COMMIT, CONTROLLER, "stop", do.stopped),
        *_each("controllers.sign_off", COMMIT, CONTROLLER, "stop", do.stopped),
        *_each("controllers.beat", COMMIT, CONTROLLER, "install", do.slow_install),
    ]


def in_turn() -> list[Round]:
    """Upgrades in waves."""
    busy: dict[str, Any] = {"first": do.busy_wave, "again": do.caught_up, "also": "cancelled"}
    return [
        *_each("intents.drain", COMMIT, CONTROLLER, "upgrade in waves", do.in_waves),
        *_each("waves.catch_up", COMMIT, TASKS, "node busy", early=True, **busy),
        *_each("intents.settle", COMMIT, CONTROLLER, "late confirmation", do.confirmed_too_late),
    ]


def left_behind() -> list[Round]:
    """What a controller or a schedule finds that others have left."""
    unhealthy: dict[str, Any] = {"first": do.without_a_controller, "again": do.healthy}
    drained: dict[str, Any] = {"first": do.on_a_drained_node, "again": do.cleaned, "outcome": "failed"}
    removed: dict[str, Any] = {"first": do.on_a_removed_node, "again": do.caught_up, "outcome": "failed"}
    return [
        *_each("intents.reap", COMMIT, CONTROLLER, "lease run out", first=do.abandoned, early=True),
        *_each("intents.explain", COMMIT, CONTROLLER, "node unhealthy", early=True, **unhealthy),
        *_each("intents.end", COMMIT, TASKS, "node drained", early=True, **drained),
        *_each("waves.conclude", COMMIT, TASKS, "node removed", early=True, **removed),
    ]


def sent() -> list[Round]:
    """Messages to workers, about backends and about themselves."""
    return [
        *_each(
            "node.stop", MESSAGE, CONTROLLER, "stop a node", do.stop_node, again=do.started_by_its_machine
        ),
        *_each("backend.list", QUESTION, CONTROLLER, "install", do.install),
        *_each("backend.install", QUESTION, CONTROLLER, "install", do.install),
        *_each("backend.upgrade", QUESTION, CONTROLLER, "upgrade", do.upgrade),
        *_each("backend.install.forced", QUESTION, CONTROLLER, "upgrade, old worker", do.forced),
        *_each("backend.delete", QUESTION, CONTROLLER, "delete", do.delete),
        *_each("backend.cancel", QUESTION, CONTROLLER, "cancel", do.cancelled_install, outcome="cancelled"),
        *_each("models.running", QUESTION, CONTROLLER, "delete", do.delete),
    ]


def of_files() -> list[Round]:
    """Imports of models, and the removal of unused files."""
    whole: dict[str, Any] = {"again": files.imported}
    cancelled: dict[str, Any] = {"again": files.import_cancelled, "outcome": "cancelled"}
    return [
        *_each("download", DOWNLOAD, CONTROLLER, "import a model", files.import_model, **whole),
        *_each("imports.save", COMMIT, CONTROLLER, "import a model", files.import_model, **whole),
        *_each("ledger.remember", COMMIT, CONTROLLER, "import, no hash", files.import_without_hash, **whole),
        *_each(
            "imports.save", COMMIT, CONTROLLER, "import, weights stay", files.import_left, again=files.left
        ),
        *_each("ledger.cancel", COMMIT, WEB, "cancel an import", files.import_cancelled_by, **cancelled),
        Round("files.removal:set_aside", CONTROLLER, "remove a file", files.remove_file, again=files.removed),
    ]


def of_models() -> list[Round]:
    """Unloading models, and deleting their files and definitions."""
    return [
        *_each("unload.begin", COMMIT, CONTROLLER, "unload a model", do.unload_model),
        *_each("model.unload", QUESTION, CONTROLLER, "unload a model, old worker", do.unload_model),
        *_each("backend.stop", MESSAGE, CONTROLLER, "unload a model, old worker", do.unload_model),
        *_each("unload.gone", COMMIT, CONTROLLER, "unload a model", do.unload_model),
        *_each("model.delete", QUESTION, CONTROLLER, "delete a model", do.delete_model),
        *_each("unload.files", COMMIT, CONTROLLER, "delete a model", do.delete_model_with_files),
        *_each("ledger.target_done", COMMIT, CONTROLLER, "delete a model", do.delete_model),
        *_each("definitions.remove", COMMIT, CONTROLLER, "delete a definition", do.remove_definition),
        Round("definitions.files", CONTROLLER, "delete a definition", do.remove_definition),
        *_each("nodes.bulk", COMMIT, CONTROLLER, "label nodes", do.label_nodes),
    ]
