"""The operation `definition_delete`: replicas first, then the row, then files that nothing else names."""

import asyncio
import dataclasses
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pytest_django import Settings

from localai_cluster.kit import clock, errors
from localai_cluster.messaging import messages
from localai_cluster.messaging import messages as m
from nodes.commands.outcomes import CommandFailed
from nodes.definitions import store
from nodes.definitions.folder import Folder, FolderUnresponsive
from nodes.loading import definition_removal, file_removal
from nodes.loading.definition_removal import RemoveDefinition
from nodes.models import ModelDefinition, NodeModel
from nodes.replicas import unload_requests
from operations.executor.work import Postpone, Work, in_thread, write_batch
from operations.ledger import attempts
from operations.ledger.admission import Admission, Requester
from operations.ledger.progress import Recorder
from operations.models import Operation, Status
from tests.support import hot
from tests.support.bus import PlayedBus

pytestmark = pytest.mark.django_db(transaction=True)

TEXT = "name: m\nbackend: echo\nparameters: {model: m/m.gguf}\nmmproj: m/mmproj.gguf\n"


@pytest.fixture(autouse=True)
def models(settings: Settings, tmp_path: Path) -> Path:
    """A models folder with the files of `m`."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, models_path=tmp_path / "models")
    folder = tmp_path / "models"
    (folder / "m").mkdir(parents=True)
    for name in ("m.gguf", "m.gguf.sha256", "mmproj.gguf"):
        (folder / "m" / name).write_text(name)
    return folder


def save(text: str = TEXT, **options: Any) -> ModelDefinition:
    return store.save(None, text, origin="api", actor="ann", now=clock.now(), **options)


def request(name: str = "m", *, files: bool = True) -> Admission:
    return definition_removal.request_removal(name, by=Requester("ann"), with_files=files, now=clock.now())


def claimed() -> Work:
    (operation,) = attempts.claim("controller", now=clock.now(), lease=60, limit=1)
    return Work(operation, Recorder(write_batch))


def run(bus: PlayedBus | None = None) -> Any:
    """One attempt of the operation."""

    async def attempt() -> Any:
        return await RemoveDefinition(bus or PlayedBus())(await in_thread(claimed))

    return asyncio.run(attempt())


def left(models: Path) -> list[str]:
    return sorted(path.relative_to(models).as_posix() for path in models.rglob("*") if path.is_file())


def test_a_deletion_without_files_is_not_joined_by_one_with_files(models: Path) -> None:
    """It would report success, and the files would stay."""
    save()
    request(files=False)
    with pytest.raises(errors.Conflict, match="without its files"):
        request(files=True)
    assert not request(files=False).created


def test_the_replicas_go_first_then_the_row_and_the_files(models: Path) -> None:
    save()
    node = hot.node()
    hot.replica(node, "m")
    bus = PlayedBus()
    bus.replies[messages.subject("model.stop", str(node.id))] = m.StopModelReply(terminated=True)
    admission = request()
    assert [target.node_name for target in admission.operation.targets.all()] == ["one"]
    assert not request().created
    result = run(bus)
    assert result["nodes"] == ["one"]
    assert (result["removed"], result["kept"]) == (["m/m.gguf", "m/mmproj.gguf"], {})
    assert not NodeModel.engines.exists()
    assert store.find("m") is None
    assert left(models) == []
    assert not (models / "m").exists()


def test_without_a_confirmed_stop_the_definition_stays(monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    monkeypatch.setattr(unload_requests, "STOP_WITHIN", 0.0)
    save()
    node = hot.node()
    hot.replica(node, "m")
    bus = PlayedBus()
    bus.replies[messages.subject("model.stop", str(node.id))] = m.StopModelReply(error="stuck")
    request()
    with pytest.raises(CommandFailed, match="one"):
        run(bus)
    assert store.find("m") is not None
    assert len(left(models)) == 3


def test_without_files_they_stay(models: Path) -> None:
    save()
    request(files=False)
    assert run()["message"] == "the definition of m is deleted"
    assert len(left(models)) == 3


def test_an_attempt_that_is_repeated_goes_on_with_the_files(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died when the row was deleted, or in the middle of the files."""
    save()
    request()

    class Killed(BaseException):
        pass

    def die(*_: Any) -> Any:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(definition_removal, "_remove_files", die)
        with pytest.raises(Killed):
            run()
    assert store.find("m") is None
    assert len(left(models)) == 3
    (models / "m" / "mmproj.gguf").unlink()
    attempts.release("controller", now=clock.now())
    assert run()["removed"] == ["m/m.gguf"]
    assert left(models) == []


def test_a_name_that_is_used_again_keeps_its_files(models: Path) -> None:
    save()
    request()
    row = store.find("m")
    assert row is not None
    store.remove("m", id=row.id, now=clock.now())  # by the attempt before
    save()
    assert run()["message"] == "the definition of m is deleted"
    assert store.find("m") is not None
    assert len(left(models)) == 3


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        ("parameters: {model: m/m.gguf}", {"m/m.gguf": "it is in use"}),
        (
            "parameters: {model: m}",
            dict.fromkeys(("m/m.gguf", "m/mmproj.gguf"), "it is in use"),
        ),
        (
            "parameters: {model: m/x.gguf}\noptions: ['draft:m.gguf']",
            {"m/m.gguf": "it is in use"},
        ),
        (
            "parameters: {model: x.gguf}\ndisabled: true\nlora_adapter: m/mmproj.gguf",
            {"m/mmproj.gguf": "it is in use"},
        ),
    ],
)
def test_a_file_that_another_definition_names_stays(models: Path, other: str, kept: dict[str, str]) -> None:
    save(f"name: other\nbackend: echo\n{other}\n")
    save()
    request()
    assert run()["kept"] == kept
    assert set(kept) <= set(left(models))


def test_a_definition_that_cannot_be_used_may_name_anything(models: Path) -> None:
    (models / "broken.yaml").write_text("name: [")
    save()
    request()
    (reason,) = set(run()["kept"].values())
    assert "broken.yaml cannot be used and may name any of the files" in reason
    assert len(left(models)) == 4


def test_files_of_an_import_that_is_under_way_stay(models: Path) -> None:
    plan = {"plan": {"files": [{"path": "m/m.gguf"}]}}
    save()
    request()
    values = {"status": Status.PENDING, "next_attempt_at": clock.now() + timedelta(hours=1)}
    Operation.objects.create(kind="model_import", key="import:x", element="x", payload=plan, **values)
    assert list(run()["kept"]) == ["m/m.gguf"]


def test_links_and_what_they_lead_to_are_never_touched(models: Path, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    (share / "big.gguf").write_text("x")
    (models / "link.gguf").symlink_to(share / "big.gguf")
    (models / "linked").symlink_to(share)
    save("name: n\nbackend: echo\nparameters: {model: link.gguf}\nmmproj: linked/big.gguf\n")
    request("n")
    result = run()
    assert result["removed"] == []
    assert result["kept"] == {"link.gguf": "it is no plain file", "linked/big.gguf": "it lies on a share"}
    assert (share / "big.gguf").exists()


def test_a_file_that_another_definition_reaches_by_a_link_stays(models: Path) -> None:
    (models / "link.gguf").symlink_to("m/m.gguf")
    save("name: other\nbackend: echo\nparameters: {model: link.gguf}\n")
    save()
    request()
    assert run()["kept"] == {"m/m.gguf": "it is in use"}


def test_files_that_another_import_has_fetched_stay(models: Path) -> None:
    other = "name: other\nbackend: echo\nparameters: {model: x.gguf}\n"
    save(other, files=[{"path": "m/mmproj.gguf"}])
    save()
    request()
    assert run()["kept"] == {"m/mmproj.gguf": "it is in use"}


def test_a_definition_that_is_saved_meanwhile_gets_its_files_back(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = file_removal._MovedFiles.take

    def clone(*arguments: Any) -> None:
        plain(*arguments)
        assert left(models) == [path for path in left(models) if path.startswith(".removed")]
        save(TEXT.replace("name: m", "name: clone"))

    monkeypatch.setattr(file_removal._MovedFiles, "take", clone)
    save()
    request()
    assert set(run()["kept"]) == {"m/m.gguf", "m/mmproj.gguf"}
    assert left(models) == ["m/m.gguf", "m/m.gguf.sha256", "m/mmproj.gguf"]


def test_a_share_is_never_cleaned(models: Path, settings: Settings) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, share_roots=(models / "m",))
    save()
    request()
    assert set(run()["kept"].values()) == {"it lies on a share"}
    assert len(left(models)) == 3


def test_an_unresponsive_folder_postpones_the_removal(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(self: Folder) -> Any:
        raise FolderUnresponsive("the models folder does not answer")

    monkeypatch.setattr(Folder, "all_contents", hang)
    save()
    request()
    with pytest.raises(Postpone, match="does not answer"):
        run()
    assert len(left(models)) == 3


def test_of_a_shadowed_definition_only_the_row_goes(models: Path) -> None:
    save()
    (models / "m.yaml").write_text(TEXT)
    hot.replica(hot.node(), "m")
    operation = request().operation
    assert (operation.key, operation.targets.count()) == ("definition:m", 0)
    assert set(run()["kept"].values()) == {"it is in use"}
    assert (store.find("m"), NodeModel.objects.count()) == (None, 1)
    with pytest.raises(errors.Conflict, match=r"m\.yaml"):
        request()


def test_an_unknown_model_and_one_that_is_loaded_are_refused() -> None:
    with pytest.raises(errors.NotFound):
        request()
    save()
    Operation.objects.create(kind="model_load", key="model:m", element="m")
    with pytest.raises(errors.Conflict, match="model_load"):
        request()
