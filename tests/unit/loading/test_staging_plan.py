"""Which files of a model go to a worker, under which keys, and what its engine is told of them (§2J, §14)."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.definitions.files import UnusableDefinition, read_definition
from nodes.definitions.sizes import measure
from nodes.loading.source_files import FilePlan, InvalidPath, Unsendable, key_of, path_of, plan_files
from nodes.loading.transfer import FileRefused, root_of
from nodes.placement.memory import required_disk

ROOT = "/srv/w/models/flux"


def put(folder: Path, *names: str, content: bytes = b"abc") -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def told(made: FilePlan, **failed: str) -> dict[str, Any]:
    return made.engine_options(ROOT, failed)[0]


def warned(made: FilePlan, **failed: str) -> list[str]:
    return made.engine_options(ROOT, failed)[1]


@pytest.mark.rule("R2.58", "T-STG-15", "T-STG-16", "T-STG-19", "worker-14")
@pytest.mark.parametrize(
    ("model", "relative", "key"),
    [
        ("flux", "sd/flux.gguf", "models/flux/sd/flux.gguf"),
        ("flux", "other/flux.gguf", "models/flux/other/flux.gguf"),
        ("flux", "flux.gguf", "models/flux/flux.gguf"),
        ("org/flux", "flux.gguf", "models/org/flux/flux.gguf"),
    ],
    ids=["sub-folder", "another one", "at the root", "a name with a slash"],
)
def test_a_key_keeps_the_folders_below_the_model(model: str, relative: str, key: str) -> None:
    assert key_of(model, relative) == key


@pytest.mark.rule("T-STG-20", "R2.58")
@pytest.mark.parametrize(
    "relative", ["../x", "a/../../x", "/x", "a//x", "./x", "a/", "", "a\\..\\x", "a\nb", "a\u202eb", "a\0"]
)
def test_no_key_leads_upward(relative: str) -> None:
    with pytest.raises(InvalidPath):
        key_of("m", relative)


@pytest.mark.rule("T-STG-20", "worker-13")
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5), st.text(min_size=1, max_size=12))
def test_every_key_stays_below_its_model_and_its_url_means_it(parts: list[str], model: str) -> None:
    try:
        key = key_of(model, "/".join(parts))
        path = path_of(key)
    except (InvalidPath, UnicodeEncodeError):
        return
    assert os.path.normpath("/" + key) == "/" + key
    assert key.startswith(f"models/{model}/")
    assert path.isascii()
    assert not set(path) & set("?# \\\r\n")
    assert path.count("/") == key.count("/") + 3, "no character of a name divides the path"


@pytest.mark.rule("T-STG-20", "worker-14")
@pytest.mark.parametrize("root", ["/srv/\ud800", "/srv/a\nb", "/srv/\u202ex", "relative", ""])
def test_a_place_that_cannot_be_told_to_an_engine_is_none(root: str) -> None:
    """The worker says it, and gRPC takes no such text."""
    with pytest.raises(FileRefused):
        root_of(f"{root}/sd/a.gguf", "sd/a.gguf")


@pytest.mark.rule("T-STG-21", "T-STG-22", "T-STG-23", "T-STG-24", "R2.58", "worker-14")
@given(st.lists(st.from_regex(r"[a-z0-9._ -]{1,9}", fullmatch=True), min_size=1, max_size=4))
def test_the_remote_root_and_the_relative_path_give_the_remote_path(parts: list[str]) -> None:
    relative = "/".join(parts)
    assert root_of(f"{ROOT}/{relative}", relative) == ROOT
    assert os.path.join(ROOT, relative) == f"{ROOT}/{relative}"


@pytest.mark.rule("worker-13")
@pytest.mark.parametrize("path", ["/elsewhere/y.gguf", "x.gguf", "", "relative/x.gguf", "/srv/badx.gguf"])
def test_a_worker_that_keeps_a_file_at_another_place_is_not_believed(path: str) -> None:
    with pytest.raises(FileRefused):
        root_of(path, "x.gguf")


@pytest.mark.rule("worker-14", "T-STG-1", "T-STG-2", "T-STG-3", "T-STG-7", "T-STG-14", "R2.57")
def test_the_example_of_the_contract(tmp_path: Path) -> None:
    put(tmp_path, "sd/flux.gguf", "sd/vae.safetensors", "extra/a", "extra/b/c", "clip.bin")
    options = {
        "Model": "sd/flux.gguf",
        "MMProj": "clip.bin",
        "Options": [
            "vae_path:sd/vae.safetensors",
            "tree:extra",
            "beside:vae.safetensors",
            "parallel:2",
            "on",
        ],
    }
    kept = {name: list(value) if isinstance(value, list) else value for name, value in options.items()}
    made = plan_files(tmp_path, "flux", options)
    assert list(made.files) == ["sd/flux.gguf", "clip.bin", "sd/vae.safetensors", "extra/a", "extra/b/c"]
    assert sum(file.size for file in made.files.values()) == 15
    assert told(made) == {
        **options,
        "ModelFile": f"{ROOT}/sd/flux.gguf",
        "ModelPath": ROOT,
        "MMProj": f"{ROOT}/clip.bin",
    }
    assert (warned(made), options) == ([], kept)


@pytest.mark.rule("T-STG-4", "T-STG-5", "T-STG-10", "T-STG-12", "T-STG-2", "R2.57", "worker-14")
def test_a_folder_goes_file_by_file_without_the_checksums_beside_files(tmp_path: Path) -> None:
    tree = ".artifacts/hf/abc"
    put(tmp_path, f"{tree}/snap/config.json", f"{tree}/snap/w.bin", f"{tree}/snap/w.bin.sha256")
    put(tmp_path, f"{tree}/snap/w.bin.sha256.target", f"{tree}/snap/genuine.sha256", f"{tree}/blobs/x")
    (tmp_path / tree / "snap" / "linked").symlink_to("../blobs/x")
    made = plan_files(tmp_path, "hf", {"Model": f"{tree}/snap"})
    names = ["config.json", "genuine.sha256", "linked", "w.bin"]
    assert list(made.files) == [f"{tree}/snap/{name}" for name in names]
    assert told(made)["ModelFile"] == f"{ROOT}/{tree}/snap"
    assert told(made)["ModelPath"] == ROOT


@pytest.mark.rule("R2.57", "T-STG-6", "worker-14")
def test_what_is_missing_is_cleared_with_its_field_and_path_told(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf", "one.bin")
    options = {
        "Model": "a.gguf",
        "MMProj": "no.bin",
        "LoraBase": "base.bin",
        "LoraAdapters": ["none.bin", "one.bin"],
        "LoraScales": [0.5, 0.25],
    }
    made = plan_files(tmp_path, "m", options)
    assert told(made) == {
        "Model": "a.gguf",
        "ModelFile": f"{ROOT}/a.gguf",
        "ModelPath": ROOT,
        "LoraBase": "base.bin",
        "LoraAdapters": [f"{ROOT}/one.bin"],
        "LoraScales": [0.25],
    }
    assert [warning.split(":")[0] for warning in warned(made)] == [
        "LoraAdapters none.bin",
        "LoraBase base.bin",
        "MMProj no.bin",
    ]
    nothing = plan_files(tmp_path, "m", {"Model": "org/repository"})
    assert (nothing.files, nothing.engine_options("", {})) == (
        {},
        ({"Model": "org/repository"}, ["ModelFile org/repository: not found in the models folder"]),
    )


@pytest.mark.rule("R2.57", "worker-14")
def test_a_file_that_did_not_get_there_is_not_told(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf", "proj.bin", "lora/x", "lora/y")
    made = plan_files(tmp_path, "m", {"Model": "a.gguf", "MMProj": "proj.bin", "LoraAdapter": "lora"})
    there, warnings = made.engine_options(ROOT, {"lora/y": "refused", "proj.bin": "too large"})
    assert {"MMProj", "LoraAdapter"}.isdisjoint(there)
    assert warnings == ["LoraAdapter lora: refused", "MMProj proj.bin: too large"]
    assert [made.is_vital(name) for name in ("a.gguf", "proj.bin", "lora/x")] == [True, False, False]


@pytest.mark.rule("R2.57", "worker-14", "T-FLW-15")
def test_what_belongs_to_a_model_comes_along(tmp_path: Path) -> None:
    """The description of a voice; the other parts of a model that was divided."""
    put(tmp_path, "v.onnx", "v.onnx.json", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf")
    assert list(plan_files(tmp_path, "m", {"Model": "v.onnx"}).files) == ["v.onnx", "v.onnx.json"]
    both = plan_files(tmp_path, "m", {"Model": "big-00001-of-00002.gguf"})
    assert list(both.files) == ["big-00001-of-00002.gguf", "big-00002-of-00002.gguf"]
    assert all(map(both.is_vital, both.files))


@pytest.mark.rule("T-STG-17", "T-STG-18", "T-STG-20", "R2.57", "R2.58")
def test_nothing_leaves_the_models_folder(tmp_path: Path) -> None:
    """D-STAGE-INSIDE."""
    folder = tmp_path / "models"
    put(tmp_path, "secret", "outside/key")
    put(folder, "a.gguf", "deep/b.bin")
    (folder / "out.bin").symlink_to(tmp_path / "secret")
    (folder / "tree").symlink_to(tmp_path / "outside")
    (folder / "deep" / "out").symlink_to("../../secret")
    (folder / "all").symlink_to(".")
    options = {
        "Model": "a.gguf",
        "MMProj": "out.bin",
        "DraftModel": str(tmp_path / "secret"),
        "CLIPModel": "../secret",
        "LoraAdapters": ["deep", "tree"],
        "Options": [f"x:{tmp_path / 'secret'}", "y:../secret", "z:.", "t:tree/key", "r:all", "d:deep/../.."],
        "Overrides": [f"inside:{folder / 'deep' / 'b.bin'}"],
    }
    made = plan_files(folder, "m", options)
    assert list(made.files) == ["a.gguf", "deep/b.bin"]
    assert {"MMProj", "DraftModel", "CLIPModel"}.isdisjoint(told(made))
    assert told(made)["LoraAdapters"] == []
    assert any("leads out of the models folder" in warning for warning in warned(made))
    for model in ("out.bin", "tree", "deep"):
        with pytest.raises(Unsendable, match="leads out"):
            plan_files(folder, "m", {"Model": model})


@pytest.mark.rule("R2.57", "worker-14")
def test_an_empty_folder_is_an_error_of_the_model_and_a_warning_of_others(tmp_path: Path) -> None:
    put(tmp_path, "a.gguf")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unsendable, match="empty folder"):
        plan_files(tmp_path, "m", {"Model": "empty"})
    with pytest.raises(Unsendable, match="no regular file"):
        plan_files(tmp_path, "m", {"Model": "pipe"})
    assert "MMProj empty: is an empty folder" in warned(
        plan_files(tmp_path, "m", {"Model": "a.gguf", "MMProj": "empty"})
    )


@pytest.mark.rule("T-STG-11", "R2.37", "C38", "worker-16")
def test_what_counts_is_what_goes(tmp_path: Path) -> None:
    """Every file that options name, once, without checksums kept beside files."""
    put(
        tmp_path,
        "tree/w.bin",
        "tree/w.bin.sha256",
        "tree/w.bin.sha256.target",
        "tree/own.sha256",
        "t",
        "c",
        "a",
    )
    text = (
        "name: m\nbackend: b\nparameters: {model: tree, tokenizer: t}\nlora_adapters: [a, t]\n"
        "diffusers: {clip_model: c}\ntts: {audio_path: a}\nlora_scales: [1, 0.5]\noverrides: ['x:c']\n"
    )
    (tmp_path / "m.yaml").write_text(text)
    defined = read_definition(tmp_path / "m.yaml")
    made = plan_files(tmp_path, "m", defined.options)
    assert measure(tmp_path, defined).payload == sum(file.size for file in made.files.values()) == 5 * 3
    assert required_disk(15) == 15 + 2**30
    assert (told(made)["CLIPModel"], told(made)["AudioPath"]) == (f"{ROOT}/c", f"{ROOT}/a")
    assert (told(made)["LoraAdapters"], told(made)["LoraScales"]) == ([f"{ROOT}/a", f"{ROOT}/t"], [1.0, 0.5])


@pytest.mark.parametrize(
    "line",
    ["lora_adapters: x", "lora_scales: [a]", "lora_scales: [true]", "overrides: [1]", "options: {a: b}"],
)
def test_lists_of_definitions_are_checked(tmp_path: Path, line: str) -> None:
    (tmp_path / "m.yaml").write_text(f"name: m\nbackend: b\nparameters: {{model: x}}\n{line}\n")
    with pytest.raises(UnusableDefinition, match=r"is not a (list of|number)"):
        read_definition(tmp_path / "m.yaml")


NAMES = st.from_regex(r"[a-z]{1,4}", fullmatch=True)


@pytest.mark.rule("T-STG-7", "T-STG-24", "R2.57")
@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), min_size=1, max_size=6, unique=True),
    st.data(),
)
def test_a_relative_value_resolves_on_the_worker_to_what_it_means_here(
    tmp_path_factory: pytest.TempPathFactory, names: list[str], data: st.DataObject
) -> None:
    """Whatever the folder looks like: what an option names here is found there under its unchanged text."""
    folder = tmp_path_factory.mktemp("models")
    there: list[str] = []
    for name in names:
        if not any(other.startswith(name + "/") or name.startswith(other + "/") for other in there):
            put(folder, name)
            there.append(name)
    model, value = data.draw(st.sampled_from(there)), data.draw(st.sampled_from(there))
    made = plan_files(folder, "m", {"Model": model, "Options": [f"file:{value}"]})
    remote = {f"{ROOT}/{relative}" for relative in made.files}
    options = told(made)
    assert options["ModelFile"] in remote
    assert os.path.join(options["ModelPath"], value) in remote
    assert os.path.join(options["ModelPath"], model) == options["ModelFile"]
    assert options["Options"] == [f"file:{value}"]


@pytest.mark.rule("R2.57")
def test_a_folder_that_cannot_be_read_whole_is_not_sent_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "tree/a", "tree/closed/b")
    plain = os.scandir

    def scandir(path: Any = ".") -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(Unsendable, match="the model's file tree cannot be read: Permission denied"):
        plan_files(tmp_path, "m", {"Model": "tree"})
