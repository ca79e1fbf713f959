"""Files of an import that stay at their sources until a node needs them: the policy `worker`.

A file stays at its source if workers can download it from a permanent address and its source publishes a
hash, which both sides verify. The import records what placement needs: the file's size, and the figures of
its header, read by range. All other files are fetched: configurations, tokenizers, and files without a
published hash.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os.path import lexists
from pathlib import Path

from localai_cluster.kit.settings_table import ClusterSettings
from nodes.definitions.files import Definition, UnusableDefinition, parse_file
from nodes.definitions.recorded_files import FileConflict, RecordedFile, downloads_on_worker, is_lasting
from nodes.definitions.rows import SOURCE_PREFIX
from nodes.definitions.sizes import records_in_definition, safe_join, shards
from nodes.downloads.downloader import DownloadMeter
from nodes.sources.opening import SourceOpener
from nodes.sources.plans import MAX_BYTES, ImportPlan, SourceFile
from nodes.sources.probing import probe_file

_CONFIGURATION_SUFFIXES = (".json", ".jinja", ".txt", ".yaml", ".yml")
"""Suffixes of files that are always fetched; a configuration determines the memory of a safetensors model."""
_OPTIONS_WITH_HEADER = ("Model", "DraftModel")
"""Options of a definition that name a file whose header placement reads."""


@dataclass(frozen=True)
class ProbedFiles:
    """Records of the files that stay, and the files that must be fetched because their size is unknown."""

    recorded: list[RecordedFile] = field(default_factory=list)
    to_download: list[SourceFile] = field(default_factory=list)


def choose_files(plan: ImportPlan, cluster: ClusterSettings) -> list[SourceFile]:
    """Return the files of the plan that stay at their sources and are not in the models folder. Blocks."""
    try:
        definition = parse_file(plan.text.encode(), SOURCE_PREFIX + plan.name)
    except UnusableDefinition:
        return []
    if cluster.shared_models or not downloads_on_worker(definition.download_on):
        return []
    return [file for file in plan.files if _can_stay(file) and not lexists(cluster.models_path / file.path)]


def _can_stay(file: SourceFile) -> bool:
    is_configuration = file.path.lower().endswith(_CONFIGURATION_SUFFIXES)
    return bool(file.sha256) and is_lasting(file.url) and not is_configuration


async def record_files(
    files: Sequence[SourceFile], plan: ImportPlan, opener: SourceOpener, meter: DownloadMeter
) -> ProbedFiles:
    """Read size and header of each file at its source. Raise SourceError."""
    left = ProbedFiles()
    if not files:
        return left
    options = parse_file(plan.text.encode(), SOURCE_PREFIX + plan.name).options
    named = [
        path for name in _OPTIONS_WITH_HEADER if (path := safe_join(Path(), options.get(name))) is not None
    ]
    for file in files:
        meter.now = f"reading the header of {file.path}"
        probed = await probe_file(opener, file, with_header=_has_header(file, named))
        size = probed.size or file.size
        if 0 < size < MAX_BYTES:
            left.recorded.append(
                RecordedFile(
                    file.path, file.url, size, file.sha256, probed.header, has_tools=probed.has_tools
                )
            )
        else:
            meter.set_size(file.path, file.size)
            left.to_download.append(file)
    return left


def _has_header(file: SourceFile, named: Iterable[Path]) -> bool:
    """Return True for a GGUF file whose header is used: the first part of a file that an option names."""
    path = Path(file.path)
    is_named = any(path == main or path.is_relative_to(main) or path in shards(main) for main in named)
    return path.suffix == ".gguf" and is_named and shards(path)[0] == path


def check_conflicts(plan: ImportPlan, models: Path, other_definitions: Iterable[Definition]) -> None:
    """Raise FileConflict if another definition names a different file at a path of the plan.

    The check comes first, so an import that cannot be saved downloads nothing.
    """
    files = {file.path: file for file in plan.files}
    for definition in other_definitions:
        if files.keys().isdisjoint(definition.files):
            continue
        named = records_in_definition(models, definition, definition.files)
        for path in files.keys() & named.keys():
            recorded, wanted = named[path], files[path]
            is_same = wanted.sha256 == recorded.sha256 if wanted.sha256 else wanted.url == recorded.source
            if not is_same:
                raise FileConflict(
                    f"model {definition.name} has another file {path}: remove it, or import under another"
                    " name"
                )
