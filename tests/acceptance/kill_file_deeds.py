"""The deeds of the kill sweep with files of models: imports, downloads for loads, and removals."""

import os
from typing import Any

from localai_cluster.kit import clock
from nodes.sources.plans import ImportPlan, SourceFile
from tests.acceptance import kill_deeds
from tests.acceptance.kill_sweep import Sweep
from tests.acceptance.test_cold_load import served
from tests.conftest import eventually
from tests.support.sources import sha256_of


def import_model(sweep: Sweep, name: str, victim: Any, more: str = "", *, has_hash: bool = True) -> None:
    """A file of three mebibytes with or without a published hash, and its definition with `more` lines."""
    data = os.urandom(3 * 2**20 + 5)
    sweep.source.files[f"/{name}.gguf"] = data
    file = SourceFile(
        f"{name}/m.gguf", sweep.source.url(f"/{name}.gguf"), len(data), sha256_of(data) if has_hash else ""
    )
    text = f"name: {name}\nbackend: echo\nparameters:\n  model: {name}/m.gguf\n{more}"
    plan = ImportPlan(name, text, (file,), "import", "a source").as_payload()
    sweep.shell(
        "from localai_cluster.kit import clock\n"
        "from nodes.downloads.imports import request_import\n"
        "from nodes.sources.plans import from_payload\n"
        "from operations.ledger.admission import Requester\n"
        f"request_import(from_payload({plan!r}), by=Requester('sweep'), now=clock.now())"
    )


def import_without_hash(sweep: Sweep, name: str, victim: Any) -> None:
    """The same of a file whose hash the attempt remembers before the file is visible."""
    import_model(sweep, name, victim, has_hash=False)


def imported(sweep: Sweep, name: str, victim: Any) -> None:
    """The file is whole, every byte of a piece that was written came once, and nothing else is left."""
    sweep.until(name, "completed")
    data, models = sweep.source.files[f"/{name}.gguf"], sweep.cluster.models
    assert (models / name / "m.gguf").read_bytes() == data
    assert list((models / ".downloads").iterdir()) == []
    ranges = [text.removeprefix("bytes=").split("-") for text in sweep.source.sent_to(f"/{name}.gguf")]
    assert len(ranges) <= 2, ranges
    assert [int(start) % 2**20 for start, _ in ranges] == [0] * len(ranges), ranges
    assert len(ranges) == 1 or int(ranges[1][0]) > 0, ranges
    query = "SELECT revision FROM model_definitions WHERE name = %s"
    assert sweep.cluster.rows(query, name) == [(1,)]


def import_left(sweep: Sweep, name: str, victim: Any) -> None:
    """An import whose file workers are to download themselves."""
    import_model(sweep, name, victim, "embeddings: true\ndownload_on: worker\n")


def left(sweep: Sweep, name: str, victim: Any) -> None:
    """The definition is saved once with the record of the file, which is not here."""
    sweep.until(name, "completed")
    query = "SELECT revision, files->0->>'sha256' FROM model_definitions WHERE name = %s"
    data = sweep.source.files[f"/{name}.gguf"]
    assert isinstance(data, bytes)
    assert sweep.cluster.rows(query, name) == [(1, sha256_of(data))]
    assert not (sweep.cluster.models / name).exists()


def import_unreached(sweep: Sweep, name: str, victim: Any) -> None:
    """The same as for workers, but the worker is known not to reach the source."""
    import_for_workers(sweep, name, victim)
    host = sweep.source.host
    query = "INSERT INTO unreached_sources (node_id, host, seen_at) VALUES (%s, %s, %s)"
    sweep.execute(query, sweep.real_node, host, clock.now())


def downloading(sweep: Sweep) -> None:
    """Wait until the source has sent the first part of a file; it keeps the rest."""
    assert sweep.source.paused.wait(20), "the source is asked for the file"


def import_cancelled_by(sweep: Sweep, name: str, victim: Any) -> None:
    """In the middle of its file; the web process that is to be killed is asked."""
    sweep.source.hold(2**20)
    import_model(sweep, name, victim)
    downloading(sweep)
    kill_deeds.cancel(sweep, name, victim)


def import_cancelled(sweep: Sweep, name: str, victim: Any) -> None:
    """Cancelled again at the web process that lives: its file does not appear, nor its definition."""
    kill_deeds.cancel(sweep, name, None)
    sweep.source.release()
    assert not (sweep.cluster.models / name).exists()
    assert not sweep.cluster.rows("SELECT 1 FROM model_definitions WHERE name = %s", name)


def downloading_load_cancelled_by(sweep: Sweep, name: str, victim: Any) -> None:
    """A load for which no request waits, in the middle of the download that it has requested."""
    sweep.source.hold(2**20)
    sweep.shell(
        "from datetime import timedelta\n"
        "from localai_cluster.kit import clock\n"
        "from nodes.models.replica import load_key\n"
        "from operations.ledger.admission import OperationRequest, Requester, admit\n"
        f"admit(OperationRequest('model_load', key=load_key({name!r}), element={name!r},"
        f" payload={{'model': {name!r}}}, by=Requester('sweep'),"
        " needed_until=clock.now() + timedelta(minutes=5)), now=clock.now())"
    )
    downloading(sweep)
    _cancel_load(sweep, name, victim)


def _cancel_load(sweep: Sweep, name: str, web: Any) -> None:
    query = "SELECT id::text FROM operations WHERE element = %s AND kind = 'model_load'"
    ((load,),) = sweep.cluster.rows(query, name)
    sweep.post(f"/api/operations/{load}/cancel", web=web)


def download_cancelled(sweep: Sweep, name: str, victim: Any) -> None:
    """After the kill both are cancelled or both go on; the load is cancelled again, and both have ended."""
    query = (
        "SELECT array_agg(status = 'cancelled' ORDER BY kind) FROM operations o WHERE element = %s AND"
        " (kind = 'model_load' OR payload ? 'files_only')"
    )
    ((cancelled,),) = sweep.cluster.rows(query, name)
    assert cancelled in ([True, True], [False, False]), "the load is cancelled, and its download is not"
    _cancel_load(sweep, name, None)
    assert sweep.cluster.rows(query, name) == [([True, True],)]
    sweep.source.release()
    assert not (sweep.cluster.models / name).exists()
    # The model can be imported again at once.
    import_left(sweep, name, victim)


def downloaded_here(sweep: Sweep, name: str, victim: Any) -> None:
    """The load ends; its file is whole here and on the worker, and each byte of it came once."""
    sweep.ask(name)
    query = "SELECT 1 FROM operations WHERE element = %s AND kind = 'model_load' AND status = 'completed'"
    eventually(lambda: sweep.cluster.rows(query, name), seconds=60, what=f"{name} is loaded")
    imported(sweep, name, victim)
    there = sweep.cluster.home / "worker-one" / "models" / name / name / "m.gguf"
    assert there.read_bytes() == sweep.source.files[f"/{name}.gguf"]


def import_for_workers(sweep: Sweep, name: str, victim: Any) -> None:
    """An import whose file workers are to download themselves; afterwards the source has seen nothing."""
    sweep.execute("DELETE FROM unreached_sources")
    former = sweep.controller()
    import_left(sweep, name, victim)
    left(sweep, name, victim)
    former.kill()
    eventually(lambda: name in served(sweep.cluster, sweep.web), what=f"{name} is served")
    sweep.source.requests.clear()


def downloaded(sweep: Sweep, name: str, victim: Any) -> None:
    """The load ends; its file is whole on the worker, came from the source once, and nothing else is left."""
    sweep.ask(name)
    query = "SELECT 1 FROM operations WHERE element = %s AND kind = 'model_load' AND status = 'completed'"
    eventually(lambda: sweep.cluster.rows(query, name), seconds=30, what=f"{name} is loaded")
    data, folder = sweep.source.files[f"/{name}.gguf"], sweep.cluster.home / "worker-one" / "models"
    assert isinstance(data, bytes)
    assert not (sweep.cluster.models / name).exists()
    assert {path.name for path in (folder / name / name).iterdir()} == {"m.gguf", "m.gguf.sha256"}
    assert (folder / name / name / "m.gguf").read_bytes() == data
    assert (folder / name / name / "m.gguf.sha256").read_text() == sha256_of(data)
    assert list(folder.glob(".*")) == []
    ranges = sweep.source.sent_to(f"/{name}.gguf")
    # A worker with a complete partial file asks for the bytes after its end.
    assert [text for text in ranges if text != f"bytes={len(data)}-"] == [""], ranges


def remove_file(sweep: Sweep, name: str, victim: Any) -> None:
    """One that nothing names."""
    (sweep.cluster.models / name).mkdir()
    (sweep.cluster.models / name / "old.gguf").write_bytes(b"old")
    sweep.post("/api/models/files/remove", {"paths": [f"{name}/old.gguf"]})


def removed(sweep: Sweep, name: str, victim: Any) -> None:
    """It has gone, and so has the place where it was meanwhile."""
    sweep.wait(
        "SELECT 1 FROM operations WHERE kind = %s AND status = %s",
        "model_files_remove",
        "completed",
        what="removed",
    )
    assert not (sweep.cluster.models / name).exists()
    assert not (sweep.cluster.models / ".removed").exists()
