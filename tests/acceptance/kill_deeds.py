"""The deeds of the kill sweep: what somebody does so that a process comes to its point."""

import os
from typing import Any

import psycopg

from localai_cluster.kit import clock
from tests.acceptance.kill_sweep import Sweep
from tests.acceptance.test_cold_load import write_model
from tests.conftest import eventually
from tests.support.simulator import Act
from tests.wire.registry import entry, layer

_SLOW = Act(seconds=3, ticks=12)
_UNTIL_CANCELLED = Act(seconds=300, ticks=1200)
"""A busy machine may take long to ask for the cancel again."""


def install(sweep: Sweep, name: str, victim: Any) -> None:
    """On two nodes, in less than a second."""
    sweep.post(f"/api/backends/install/{name}", {"nodes": sweep.nodes})


def install_by(sweep: Sweep, name: str, victim: Any) -> None:
    """The web process that is to be killed is asked."""
    sweep.post(f"/api/backends/install/{name}", {"nodes": sweep.nodes}, web=victim)


def slow_install(sweep: Sweep, name: str, victim: Any) -> None:
    """Until a worker is at it."""
    _begun(sweep, name, _SLOW)


def _begun(sweep: Sweep, name: str, act: Act) -> None:
    sweep.script(install=act)
    install(sweep, name, None)
    sweep.running(name)


def refused_install(sweep: Sweep, name: str, victim: Any) -> None:
    """Until it has failed."""
    sweep.script(install=Act(refuse="no such image"))
    install(sweep, name, victim)


def upgrade(sweep: Sweep, name: str, victim: Any) -> None:
    """On two nodes."""
    sweep.post(f"/api/backends/upgrade/{sweep.old()}", {"nodes": sweep.nodes})


def delete(sweep: Sweep, name: str, victim: Any) -> None:
    """On two nodes."""
    sweep.post(f"/api/backends/delete/{sweep.old()}", {"nodes": sweep.nodes})


def forced(sweep: Sweep, name: str, victim: Any) -> None:
    """An upgrade by a worker that does not know the command."""
    sweep.post(f"/api/backends/upgrade/{sweep.old()}", {"nodes": [sweep.fleet.workers[2].node_id]})


def cancel(sweep: Sweep, name: str, victim: Any) -> None:
    """What runs for this round."""
    sweep.post(f"/api/operations/{sweep.id_of(name)}/cancel", web=victim)


def cancelled_install(sweep: Sweep, name: str, victim: Any) -> None:
    """While a worker is at it; the web process that lives is asked."""
    _begun(sweep, name, _UNTIL_CANCELLED)
    cancel(sweep, name, None)


def cancelled_by(sweep: Sweep, name: str, victim: Any) -> None:
    """While a worker is at it; the web process that is to be killed is asked."""
    _begun(sweep, name, _UNTIL_CANCELLED)
    cancel(sweep, name, victim)


def dismiss(sweep: Sweep, name: str, victim: Any) -> None:
    """The failure of this round."""
    sweep.post(f"/api/operations/{sweep.id_of(name)}/dismiss", web=victim)


def dismissed_by(sweep: Sweep, name: str, victim: Any) -> None:
    """Once it has failed."""
    refused_install(sweep, name, None)
    sweep.until(name, "failed")
    dismiss(sweep, name, victim)


def dismiss_many(sweep: Sweep, name: str, victim: Any) -> None:
    """The failure of this round, as one of a selection."""
    body = {"verb": "dismiss", "ids": [str(sweep.id_of(name))]}
    sweep.post("/api/operations/bulk", body, web=victim)


def selected_by(sweep: Sweep, name: str, victim: Any) -> None:
    """Once it has failed."""
    refused_install(sweep, name, None)
    sweep.until(name, "failed")
    dismiss_many(sweep, name, victim)


def cleared_by(sweep: Sweep, name: str, victim: Any) -> None:
    """The record, once the install has ended."""
    install(sweep, name, None)
    sweep.until(name, "completed")
    sweep.delete("/api/operations/history", victim)


def interrupted(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker is restarted while it installs: the attempt fails, and another one is due in 30 s."""
    sweep.script(install=Act(seconds=20, ticks=80))
    sweep.post(f"/api/backends/install/{name}", {"nodes": sweep.nodes[:1]})
    sweep.running(name)
    sweep.restart_worker(0)
    sweep.script(install=Act(seconds=0.3, ticks=2))


def retry(sweep: Sweep, name: str, victim: Any) -> None:
    """What rests between two attempts."""
    sweep.post(f"/api/operations/{sweep.id_of(name)}/retry", web=victim)


def retried_by(sweep: Sweep, name: str, victim: Any) -> None:
    """Once an attempt has failed."""
    interrupted(sweep, name, None)
    sweep.until_failed_once(name)
    retry(sweep, name, victim)


def last_attempt(sweep: Sweep, name: str, victim: Any) -> None:
    """The tenth attempt is interrupted."""
    sweep.script(install=Act(seconds=20, ticks=80))
    sweep.post(f"/api/backends/install/{name}", {"nodes": sweep.nodes[:1]})
    sweep.running(name)
    sweep.execute("UPDATE pending_backend_ops SET attempts = 9 WHERE backend = %s", name)
    sweep.restart_worker(0)
    sweep.script(install=Act(seconds=0.3, ticks=2))


def stopped(sweep: Sweep, name: str, victim: Any) -> None:
    """The controller is told to stop while a worker is at it."""
    slow_install(sweep, name, victim)
    victim.child.terminate()


def abandoned(sweep: Sweep, name: str, victim: Any) -> None:
    """A controller was killed while a worker is at it."""
    former = sweep.controller()
    slow_install(sweep, name, None)
    former.kill()


def without_a_controller(sweep: Sweep, name: str, victim: Any) -> None:
    """Asked for while none runs, and one node is thought unhealthy."""
    install(sweep, name, victim)
    sweep.execute(
        "UPDATE backend_nodes SET unhealthy_at = last_heartbeat, unhealthy_by = 'test' WHERE id = %s",
        sweep.nodes[1],
    )


def healthy(sweep: Sweep, name: str, victim: Any) -> None:
    """The node is well again."""
    sweep.execute(
        "UPDATE backend_nodes SET unhealthy_at = NULL, unhealthy_by = '' WHERE id = %s", sweep.nodes[1]
    )


def stop_node(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker of a node is told to end."""
    sweep.post(f"/api/nodes/{sweep.nodes[0]}/stop")


def started_by_its_machine(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker has left, and its machine starts it again."""
    left = "SELECT 1 FROM backend_nodes WHERE id = %s AND offline_at IS NOT NULL"
    eventually(lambda: sweep.cluster.rows(left, sweep.nodes[0]), seconds=30, what="the worker has left")
    sweep.restart_worker(0)


def on_a_drained_node(sweep: Sweep, name: str, victim: Any) -> None:
    """Asked for while no controller runs; then one node is drained."""
    install(sweep, name, victim)
    sweep.post(f"/api/nodes/{sweep.nodes[1]}/drain")


def cleaned(sweep: Sweep, name: str, victim: Any) -> None:
    """The schedule runs again; afterwards the node is back."""
    sweep.clean()
    sweep.until(name, "failed")
    sweep.post(f"/api/nodes/{sweep.nodes[1]}/resume")


def in_waves(sweep: Sweep, name: str, victim: Any) -> None:
    """An upgrade of two nodes, one after the other."""
    sweep.post(f"/api/backends/upgrade/{sweep.old()}", {"nodes": sweep.nodes, "waves": {}})


def chosen_by(sweep: Sweep, name: str, victim: Any) -> None:
    """The first wave failed; the web process that is to be killed is told to continue."""
    backend = sweep.old()
    sweep.script(upgrade=Act(refuse="no such image"))
    sweep.post(f"/api/backends/upgrade/{backend}", {"nodes": sweep.nodes, "waves": {}})
    query = "SELECT 1 FROM operations WHERE element = %s AND waves = 'asks'"
    sweep.wait(query, backend, what="an operator is asked")
    sweep.script()
    sweep.asked = f"/api/operations/{sweep.id_of(backend)}/waves"
    sweep.post(sweep.asked, {"choice": "continue"}, web=victim)


def choose(sweep: Sweep, name: str, victim: Any) -> None:
    """The same at the web process that lives."""
    sweep.post(sweep.asked, {"choice": "continue"})


def busy_wave(sweep: Sweep, name: str, victim: Any) -> None:
    """A wave opens while its node is busy with the same backend, which then ends; no controller is left."""
    former, backend, busy = sweep.controller(), sweep.old(), sweep.fleet.workers[1]
    busy.script.acts = {"backend.upgrade": Act(seconds=300, ticks=600)}
    sweep.post(f"/api/backends/upgrade/{backend}", {"nodes": sweep.nodes[1:]})
    sweep.running(backend)
    first = sweep.id_of(backend)
    sweep.post(f"/api/backends/upgrade/{backend}", {"nodes": sweep.nodes, "waves": {}})
    query = "SELECT 1 FROM operation_targets WHERE reason LIKE 'other work%%' AND status = %s"
    sweep.wait(query, "queued", what="the wave waits for the node")
    busy.script.acts = {}
    sweep.post(f"/api/operations/{first}/cancel")
    sweep.wait("SELECT 1 WHERE NOT EXISTS (SELECT FROM pending_backend_ops)", what="the node is free")
    former.kill()
    sweep.execute(
        "UPDATE operation_targets SET next_check_at = %s WHERE reason LIKE 'other work%%'", clock.now()
    )


def caught_up(sweep: Sweep, name: str, victim: Any) -> None:
    """The schedule runs again."""
    sweep.clean()


def delete_model(sweep: Sweep, name: str, victim: Any) -> None:
    """Its files on one node."""
    sweep.post(f"/api/nodes/{sweep.nodes[0]}/models/delete", {"model_name": name, "wait": False})


def delete_model_with_files(sweep: Sweep, name: str, victim: Any) -> None:
    """The same of a model whose files were sent to the node."""
    query = "INSERT INTO brought_models (node_id, model_name, size, seen_at) VALUES (%s, %s, 1, %s)"
    sweep.execute(query, sweep.nodes[0], name, clock.now())
    delete_model(sweep, name, victim)


def unload_model(sweep: Sweep, name: str, victim: Any) -> None:
    """From a worker that has no `model.stop`."""
    sweep.serve(2, name)
    path = f"/api/nodes/{sweep.fleet.workers[2].node_id}/models/unload"
    sweep.post(path, {"model_name": name, "wait": False})


def remove_definition(sweep: Sweep, name: str, victim: Any) -> None:
    """A stored definition that a worker without `model.stop` serves, with its files."""
    sweep.serve(2, name)
    text = f"name: {name}\nbackend: echo\nparameters: {{model: {name}.gguf}}\n"
    sweep.post("/api/definitions", {"text": text})
    sweep.delete(f"/api/definitions/{name}?files=true", sweep.web)


def label_nodes(sweep: Sweep, name: str, victim: Any) -> None:
    """A verb of the registry on two nodes, as one operation."""
    sweep.post("/api/nodes/bulk", {"verb": "label", "ids": sweep.nodes, "labels": {"round": name}})


def cancelled_without_the_bus(sweep: Sweep, name: str, victim: Any) -> None:
    """While a worker is at it the bus is cut, so that nobody can ask it to stop."""
    _begun(sweep, name, _UNTIL_CANCELLED)
    sweep.cluster.nats.stop()
    cancel(sweep, name, None)


def bus_again(sweep: Sweep, name: str, victim: Any) -> None:
    """The bus is back."""
    sweep.cluster.nats.start(sweep.cluster.reaper)


def confirmed_too_late(sweep: Sweep, name: str, victim: Any) -> None:
    """A last replica is confirmed after the attempt's last look, and before it is put back for asking that.

    The model is busy, so no other node can load it. A lock on its replicas holds the attempt up meanwhile.
    """
    backend, busy = sweep.old(), sweep.fleet.workers[2]
    busy.script.acts = {"model.delete": Act(seconds=5)}
    sweep.post("/api/nodes/models/delete", {"model_name": name, "wait": False})
    heard = busy.machine.received
    eventually(
        lambda: any(one.verb == "model.delete" and one.body["model_name"] == name for one in list(heard))
    )
    for number in (0, 1):
        sweep.serve(number, name, backend)
    with psycopg.connect(sweep.cluster.postgres.url) as link:
        link.execute("SELECT 1 FROM node_models WHERE model_name = %s FOR UPDATE", (name,))
        sweep.post(f"/api/backends/upgrade/{backend}", {"nodes": sweep.nodes[:1], "waves": {}})
        query = (
            "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%node_models%%'"
        )
        sweep.wait(query, what="the attempt wants to take the replica out")
        link.execute("DELETE FROM node_models WHERE model_name = %s AND node_id = %s", (name, sweep.nodes[1]))
        path = f"/api/operations/{sweep.id_of(backend)}/waves"
        sweep.post(path, {"choice": "continue", "last_replicas": [name]})


def on_a_removed_node(sweep: Sweep, name: str, victim: Any) -> None:
    """Asked for while no controller runs; then one node is removed. Its worker comes back as another."""
    install(sweep, name, victim)
    sweep.delete(f"/api/nodes/{sweep.nodes[1]}", sweep.web)


def load(sweep: Sweep, name: str, victim: Any) -> None:
    """A request for a model that takes a second to load."""
    write_model(sweep.cluster, name, load_seconds=1)
    sweep.ask(name)


def load_of_a_file(sweep: Sweep, name: str, victim: Any) -> None:
    """The same of a model that has a file, which is sent to the worker."""
    (sweep.cluster.models / name).write_bytes(name.encode() * 100_000)
    load(sweep, name, victim)


def load_by(sweep: Sweep, name: str, victim: Any) -> None:
    """The web process that is to be killed is asked."""
    write_model(sweep.cluster, name, load_seconds=1)
    sweep.ask(name, victim)


def joined_by(sweep: Sweep, name: str, victim: Any) -> None:
    """A second request for the model comes to the web process that is to be killed."""
    slow_load(sweep, name, victim)
    sweep.ask(name, victim)


def slow_load(sweep: Sweep, name: str, victim: Any) -> None:
    """Until its engine runs."""
    _loading(sweep, name, 3)


def _loading(sweep: Sweep, name: str, seconds: float) -> None:
    write_model(sweep.cluster, name, load_seconds=seconds)
    sweep.ask(name)
    sweep.loading(name)


def load_cancelled_by(sweep: Sweep, name: str, victim: Any) -> None:
    """While its engine loads; the request that waits for the model may ask for it again."""
    _loading(sweep, name, 12)
    cancel(sweep, name, victim)


def stopped_load(sweep: Sweep, name: str, victim: Any) -> None:
    """The controller is told to stop while an engine loads."""
    slow_load(sweep, name, victim)
    victim.child.terminate()


def abandoned_load(sweep: Sweep, name: str, victim: Any) -> None:
    """A controller was killed while an engine loads."""
    former = sweep.controller()
    slow_load(sweep, name, None)
    former.kill()


def failing_load(sweep: Sweep, name: str, victim: Any) -> None:
    """Its engine exits when it starts."""
    write_model(sweep.cluster, name, "broken")
    sweep.ask(name)


def failed_load_retried_by(sweep: Sweep, name: str, victim: Any) -> None:
    """Once its engine has exited; it exits again."""
    failing_load(sweep, name, None)
    sweep.until(name, "failed")
    retry(sweep, name, victim)


def away(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker leaves."""
    sweep.stop_worker()


def back(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker comes back, and the model is asked for again."""
    sweep.start_worker()
    sweep.ask(name)


def back_for_a_load(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker comes back while a load waits for it."""
    load(sweep, name, victim)
    sweep.until(name, "waiting_for_nodes")
    sweep.start_worker()


def again(sweep: Sweep, name: str, victim: Any) -> None:
    """The model is asked for again."""
    sweep.ask(name)


def real_upgrade(sweep: Sweep, name: str, victim: Any) -> None:
    """Of a backend of the real worker."""
    sweep.post("/api/backends/upgrade/echo", {"nodes": [sweep.real_node]})


def real_delete(sweep: Sweep, name: str, victim: Any) -> None:
    """Of a backend of the real worker."""
    sweep.post("/api/backends/delete/echo", {"nodes": [sweep.real_node]})


def with_files(sweep: Sweep, name: str, victim: Any) -> None:
    """The backend is there."""
    sweep.ready_files()


def real_pull(sweep: Sweep, name: str, victim: Any) -> None:
    """Of an image with two layers, by the real worker."""
    layers = [layer(entry("run.sh", b"#!/bin/sh\n")), layer(entry("lib/one", os.urandom(300_000)))]
    sweep.registry.push(f"a/{name}", layers)
    uri = f"oci://{sweep.registry.host}/a/{name}"
    nodes = [sweep.real_node]
    sweep.post("/api/backends/install-external", {"uri": uri, "name": name, "nodes": nodes})


def retry_pull(sweep: Sweep, name: str, victim: Any) -> None:
    """The worker asks for each layer from the byte after those that the killed one had written."""
    sweep.until_failed_once(name)
    folder = sweep.cluster.home / "worker-one" / "backends"
    expected = sorted(path.stat().st_size for path in folder.glob(".partial-*"))
    before = len(sweep.registry.seen("storage"))
    retry(sweep, name, None)
    sweep.until(name, "completed")
    starts = [int(request.range[6:-1] or 0) for request in sweep.registry.seen("storage")[before:]]
    assert sorted(start for start in starts if start) == expected, starts
    assert (folder / name / "lib" / "one").stat().st_size == 300_000
    assert not list(folder.glob(".*"))


def retry_real(sweep: Sweep, name: str, victim: Any) -> None:
    """At once, not after the pause that follows a failed attempt."""
    sweep.until_failed_once("echo")
    retry(sweep, "echo", None)
