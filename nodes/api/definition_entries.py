"""Definitions of models, from files and stored rows, as the REST API and the command line show them."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from asgiref.sync import async_to_sync
from django.db.models import F

from localai_cluster.kit import errors, names
from localai_cluster.web.shapes import Row
from nodes.api import definition_shapes as shapes
from nodes.definitions import edit, schema, store
from nodes.definitions.files import Definition, UnusableDefinition
from nodes.definitions.folder import FolderUnresponsive, MergedRow, folder
from nodes.definitions.recorded_files import RecordedFiles, files_at_source
from nodes.definitions.rows import SOURCE_PREFIX, stored_definition
from nodes.definitions.sizes import named_paths, shards
from nodes.loading.files_in_use import in_folder_thread
from nodes.models import DefinitionRevision, ModelDefinition

_QUERY_PATTERN = re.compile(r"[?#].*", re.DOTALL)
"""Query and fragment of a URL, which may contain a secret."""
MAX_FILES = 1000
"""Maximum number of files listed for one definition."""


class DefinitionEntry:
    """A model in the list of definitions: the definition in force and the stored row.

    One of them may be missing.
    """

    def __init__(self, name: str, definition: Definition | None, stored: MergedRow | None) -> None:
        self.name, self.stored = name, stored
        source = definition.source if definition is not None else ""
        self.file = stored.file if stored is not None else "" if source.startswith(SOURCE_PREFIX) else source
        """The file that defines the model; empty without one."""
        content = stored.row.content if stored is not None else definition
        self.error = content if isinstance(content, UnusableDefinition) else None
        self.own = content if isinstance(content, Definition) else None
        """The definition of the row, of the file without one."""
        self.definition = definition if definition is not None else self.own

    @property
    def origin(self) -> str:
        return self.stored.row.origin if self.stored is not None else "file"

    @property
    def revision(self) -> int:
        return self.stored.row.revision if self.stored is not None else 0

    @property
    def state(self) -> str:
        if self.stored is not None and self.file:
            return "shadowed"
        says_disabled = self.own is not None and self.own.disabled
        if says_disabled or (self.stored is not None and self.stored.row.disabled):
            return "disabled"
        return "active" if self.error is None else "unusable"

    @property
    def updated_at(self) -> datetime:
        if self.stored is not None:
            return self.stored.row.updated_at
        assert self.definition is not None
        return datetime.fromtimestamp(self.definition.changed, UTC)

    def contains(self, term: str) -> bool:
        definition = self.definition
        texts = (self.name, definition.backend, definition.model) if definition is not None else (self.name,)
        return any(term in text.casefold() for text in texts)

    def summary(self, size: int, actor: str) -> Row:
        definition = self.definition
        return shapes.SUMMARY_SHAPE.of_object(
            self,
            backend=definition.backend if definition is not None else "",
            model=definition.model if definition is not None else "",
            size=size,
            context_size=definition.options.get("ContextSize") if definition is not None else None,
            use_cases=list(definition.use_cases) if definition is not None else [],
            actor=actor,
            problem=names.to_single_line(str(self.error or "")),
        )


def read_entries() -> list[DefinitionEntry]:
    """Return all models that a file or a row defines, sorted by name. Uses no query of this connection."""
    models = folder()
    in_force = {definition.name: definition for definition in async_to_sync(models.all)()}
    in_force |= async_to_sync(models.disabled)()
    stored = {entry.row.name: entry for entry in async_to_sync(models.stored_rows)()}
    return [
        DefinitionEntry(name, in_force.get(name), stored.get(name))
        for name in sorted(in_force.keys() | stored)
    ]


def find_definition(name: str) -> Definition | None:
    """Return the model's definition, also one that says `disabled: true`."""
    models = folder()
    return async_to_sync(models.find)(name) or async_to_sync(models.disabled)().get(name)


def find_entry(name: str) -> tuple[DefinitionEntry, ModelDefinition | None]:
    """Return the entry of the model and its current row. Raise NotFound."""
    row, definition = store.find(name), find_definition(name)
    if row is None and (definition is None or definition.source.startswith(SOURCE_PREFIX)):
        raise errors.NotFound("there is no such definition")
    merged = MergedRow(stored_definition(row), store.file_of(name)) if row is not None else None
    return DefinitionEntry(name, definition, merged), row


def actors_of(entries: Sequence[DefinitionEntry]) -> Mapping[str, str]:
    """Return who saved the latest revision of each entry, by model name; one query."""
    latest = DefinitionRevision.objects.filter(
        definition__name__in=[entry.name for entry in entries if entry.stored is not None],
        definition__deleted_at__isnull=True,
        number=F("definition__revision"),
    )
    return dict(latest.values_list("definition__name", "actor"))


def read_unusable_rows() -> list[Row]:
    """Return the files and stored definitions that cannot be used, each with line and reason."""
    models = folder()
    reasons = async_to_sync(models.problems)().files
    found: dict[str, UnusableDefinition] = dict(async_to_sync(models.unusable_files)())
    for stored in async_to_sync(models.stored_rows)():
        if isinstance(stored.row.content, UnusableDefinition):
            found[stored.row.source] = stored.row.content
    nothing = UnusableDefinition()
    return [
        shapes.UNUSABLE_SHAPE.of(
            file="" if source.startswith(SOURCE_PREFIX) else source,
            name=names.to_single_line(found.get(source, nothing).name),
            line=found.get(source, nothing).line,
            column=found.get(source, nothing).column,
            error=reason,
        )
        for source, reason in sorted(reasons.items())
    ]


def definition_detail(name: str) -> Row:
    """Return the definition with its text; raise NotFound."""
    entry, row = find_entry(name)
    text = row.text if row is not None else store.text_in_force(name) or ""
    own, error = entry.own, entry.error
    files = async_to_sync(folder().file_lists)([own])[0] if own is not None else []
    problem = async_to_sync(folder().problems)().folder
    warnings = [
        *schema.check_text(text, SOURCE_PREFIX).warnings,
        *([f"the models folder {problem}"] * bool(problem)),
    ]
    return shapes.DETAIL_SHAPE.of_object(
        entry,
        name=name,
        text=text,
        shadowed=entry.state == "shadowed",
        form=shapes.FORM_SHAPE.of(**edit.form_of(own)) if own is not None else None,
        size=sum(size for _, size in files),
        files=_file_rows(own, files, problem) if own is not None else [],
        actor=actors_of([entry]).get(name, ""),
        warnings=warnings,
        error=names.to_single_line(str(error or "")),
    )


async def _files_at_source(definition: Definition) -> RecordedFiles:
    """Return the files that are at their sources and not in the folder, by path; {} if it cannot be read."""
    with suppress(FolderUnresponsive, OSError):
        return await in_folder_thread(files_at_source, folder().path, definition.files)
    return {}


def _file_rows(definition: Definition, files: Sequence[tuple[str, int]], problem: str) -> list[Row]:
    """Return rows of the definition's files, with the place of each: the folder, its source, or missing.

    While the folder has a problem no file counts as being at its source, because it may be in the folder.
    """
    base = folder().path
    at_source = async_to_sync(_files_at_source)(definition) if files else {}
    present = dict(files)
    named = {str(part) for path in named_paths(base, definition) for part in shards(path)}
    absent = {path for path in named - present.keys() if not any(p.startswith(f"{path}/") for p in present)}
    return [
        shapes.MODEL_FILE_SHAPE.of(
            path=names.to_single_line(path.removeprefix(f"{base}/")),
            size=present.get(path, 0),
            present=path in present and path not in at_source,
            source=names.to_single_line(_QUERY_PATTERN.sub("", at_source[path].source))
            if path in at_source and not problem
            else "",
        )
        for path in sorted({*present, *absent})[:MAX_FILES]
    ]


def summaries_of(entries: Sequence[DefinitionEntry]) -> list[Row]:
    """Return the entries in the form of the list; one query."""
    actors = actors_of(entries)
    definitions = [entry.definition for entry in entries if entry.definition is not None]
    lists = async_to_sync(folder().file_lists)(definitions)
    sizes = {
        definition.name: sum(size for _, size in files)
        for definition, files in zip(definitions, lists, strict=True)
    }
    return [entry.summary(sizes.get(entry.name, 0), actors.get(entry.name, "")) for entry in entries]
