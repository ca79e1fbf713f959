"""Find the model that a reference names, with its variants, each with definition and files.

This module does not read the database: sources take seconds, and no database connection must wait for them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from localai_cluster.gallery_index import GalleryEntry, public_url
from localai_cluster.kit import names
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.kit.outbound import SourceError
from localai_cluster.kit.settings_table import ClusterSettings
from nodes.definitions import edit, schema
from nodes.definitions.files import MAX_FILE_BYTES
from nodes.definitions.headers import MAX_CONFIG_BYTES, Header
from nodes.sources import galleries, images, objects, probing, shares, variants, writing
from nodes.sources.hub import Hub, Repository
from nodes.sources.opening import SourceFileOpener, build_outbound
from nodes.sources.plans import ImportPlan, SourceFile, check_files
from nodes.sources.references import (
    DefinitionRef,
    HubRef,
    ImageRef,
    ObjectRef,
    Reference,
    SharedRef,
    WebRef,
)
from nodes.sources.variants import RepositoryFile, Variant, variants_of

MAX_PROBED = 20
"""Maximum files of a definition whose sizes are requested from their sources."""
_WHISPER_FILE_PREFIX = "ggml-"


@dataclass(frozen=True)
class Choice:
    """A variant that can be imported: its definition, the files to fetch, and its header if it was read."""

    variant: Variant
    settings: Mapping[str, Any]
    files: tuple[SourceFile, ...]
    header: Header | None = None
    context: int = 0
    """Context length in tokens that the model was trained for; 0 if unknown."""


@dataclass(frozen=True)
class SourceModel:
    """A model of a source, with its variants; `source` is its displayable address."""

    kind: str
    title: str
    source: str
    name: str
    """The suggested name; the user may change it."""
    choices: tuple[Choice, ...] = ()
    description: str = ""
    licence: str = ""
    gated: bool = False
    urls: tuple[str, ...] = ()
    icon: str = ""
    commit: str = ""
    task: str = ""
    problem: str = ""
    wanted: str = ""
    """The variant that the reference names; "" if it names none."""
    origin: str = "import"

    def plan(self, choice: Choice, name: str, changes: Mapping[str, Any] | None = None) -> ImportPlan:
        """Return the plan that imports a choice under `name`; raise InvalidInput."""
        text = writing.text_of(writing.with_name(choice.settings, name))
        text = edit.apply_changes(text, changes) if changes else text
        schema.require_usable(text, self.source)
        return ImportPlan(name, text, check_files(choice.files), self.origin, self.source)


class SourceFinder:
    """Reads sources with the credentials of the settings."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self.outbound = build_outbound(settings)
        self.opener = SourceFileOpener(settings, self.outbound)
        self.hub = Hub(self.outbound, settings.hugging_face_url, has_token=bool(settings.hugging_face_token))

    async def find(self, reference: Reference | GalleryEntry) -> SourceModel:
        """Return the model of the reference or gallery entry. Raise InvalidInput or SourceError."""
        match reference:
            case GalleryEntry():
                return await self._find_in_gallery(reference)
            case HubRef():
                return await self._find_on_hub(reference)
            case ImageRef():
                return await self._find_in_registry(reference)
            case WebRef(url=url):
                return await self._find_on_web(url)
            case ObjectRef():
                return await self._find_object(reference)
            case SharedRef(path=path):
                return await self._find_on_share(path)
            case DefinitionRef(text=text):
                return await self._parse_definition(text, "a pasted definition")
        raise InvalidInput("text: names several models: choose one of them", field="text")

    async def _find_on_hub(self, reference: HubRef) -> SourceModel:
        repository = await self.hub.repository(reference)
        listed = _variants(repository.files, reference.path)
        wanted = reference.path or reference.quantization
        chosen = variants.select(listed, wanted) if wanted else None
        if wanted and chosen is None:
            raise _no_variant(repository.id, wanted, listed)
        # With the commit: an import of another one does not replace files that a definition in force names.
        folder = f"hf/{repository.id}@{repository.commit[:12]}"
        name = writing.model_name(repository.id.partition("/")[2].removesuffix("-GGUF").removesuffix("-gguf"))
        header, context, problem = await self._hub_header(repository, chosen or next(iter(listed), None))

        def build_choice(variant: Variant) -> Choice:
            settings = writing.definition_of(name, variant, folder, task=repository.task, context=context)
            files = [_hub_file(repository, folder, file) for file in variant.files]
            return Choice(variant, settings, tuple(files), header, context)

        page = f"{self._settings.hugging_face_url}/{repository.id}"
        if not listed:
            problem = "it has no GGUF file and no weights in safetensors that could be run"
        return SourceModel(
            "huggingface",
            repository.id,
            f"hf://{repository.id}@{repository.commit}",
            name,
            tuple(map(build_choice, listed)),
            licence=repository.licence,
            gated=repository.gated,
            urls=(page,),
            commit=repository.commit,
            task=writing.USE_CASES.get(repository.task, ""),
            problem=problem,
            wanted=chosen.id if chosen else "",
        )

    async def _hub_header(
        self, repository: Repository, variant: Variant | None
    ) -> tuple[Header | None, int, str]:
        """Return header, context and problem of a variant. An unreadable header becomes a problem."""
        if variant is None or variant.format in ("pipeline", "file"):
            return None, 0, ""
        try:
            if variant.format == "gguf":
                file = _hub_file(repository, "hf", variant.files[0])
                header = await probing.gguf_header(self.opener, file)
                return header, probing.trained_context(header), ""
            address = self.opener.web_address(f"hf://{repository.id}@{repository.commit}/config.json")
            content = await self.outbound.read(address, MAX_CONFIG_BYTES)
            header, config = probing.config_header(content)
            return header, probing.trained_context(header, config), ""
        except SourceError as error:
            return None, 0, error.message

    async def _gguf_header(self, file: SourceFile) -> tuple[Header | None, str]:
        """Return the header of a GGUF file, or None and the reason why it cannot be read."""
        try:
            return await probing.gguf_header(self.opener, file), ""
        except SourceError as error:
            return None, error.message

    async def _find_in_registry(self, reference: ImageRef) -> SourceModel:
        model = await images.read_model(self.opener, reference)
        if model.unsupported:
            reason = f"{reference.name} has {', '.join(model.unsupported)}, which is not supported"
            raise InvalidInput(f"text: {reason}", field="text")
        files = tuple(model.files())
        header, problem = await self._gguf_header(files[0])
        context = probing.trained_context(header)
        name = writing.model_name(reference.name.removesuffix(":latest"))
        settings = writing.definition_of(name, model.variant, model.folder, context=context)
        if header is not None and header.architecture.endswith("bert"):
            settings = writing.definition_of(name, model.variant, model.folder, task="feature-extraction")
        choice = Choice(model.variant, images.with_parameters(settings, model), files, header, context)
        is_ollama = reference.is_ollama
        page = f"https://ollama.com/{reference.reference.path}" if is_ollama else ""
        return SourceModel(
            "ollama" if is_ollama else "oci",
            reference.name,
            f"{'ollama' if is_ollama else 'oci'}://{reference.reference}",
            name,
            (choice,),
            licence=model.licence,
            urls=(page,) if page else (),
            task="chat",
            problem=problem,
        )

    async def _find_on_web(self, url: str) -> SourceModel:
        shown = public_url(url)
        file_name = unquote(urlsplit(url).path.rpartition("/")[2])
        if file_name.lower().endswith((".yaml", ".yml")):
            text = await self.outbound.read(url, MAX_FILE_BYTES)
            return await self._parse_definition(text.decode("utf-8", "replace"), shown)
        if urlsplit(url).query:
            raise InvalidInput(
                "text: the address has a query, which may be a signature or a secret; use one without",
                field="text",
            )
        # With its folders: files of one name at one host are different files.
        parts = [unquote(part) for part in urlsplit(url).path.split("/")[:-1] if part]
        folder = "/".join(("web", urlsplit(url).netloc.rpartition("@")[2].replace(":", "-"), *parts))
        source = SourceFile(f"{folder}/{file_name}", url)
        content, total = await probing.read_start(self.opener, source, 4)
        is_whisper = file_name.startswith(_WHISPER_FILE_PREFIX) and file_name.endswith(".bin")
        if content != b"GGUF" and not is_whisper:
            raise InvalidInput(
                f"text: {shown} is not a GGUF file;"
                " only GGUF files and whisper's .bin files can be imported by address",
                field="text",
            )
        variant = _single_file_variant(file_name, total)
        name = writing.model_name(PurePosixPath(variant.main).stem)
        file = replace(source, size=variant.size)
        header = await probing.gguf_header(self.opener, file) if variant.format == "gguf" else None
        context = probing.trained_context(header)
        task = "automatic-speech-recognition" if variant.format == "file" else ""
        settings = writing.definition_of(name, variant, folder, task=task, context=context)
        choice = Choice(variant, settings, (file,), header, context)
        return SourceModel("https", shown, shown, name, (choice,), task="chat", urls=(shown,))

    async def _find_object(self, reference: ObjectRef) -> SourceModel:
        address = f"s3://{reference.bucket}/{reference.key}"
        store = await objects.store(self._settings, reference.bucket)
        with objects.translate_errors(address):
            listed = await objects.list_files(store, reference.key)
        prefix = reference.key.rpartition("/")[0] + "/" if "/" in reference.key else ""
        if len(listed) != 1:
            prefix = reference.key.rstrip("/") + "/"
        files = [replace(file, path=file.path.removeprefix(prefix)) for file in listed]
        found = variants_of(files)
        if not found:
            raise InvalidInput(f"text: {address} has no file of a model", field="text")
        folder = f"s3/{reference.bucket}/{prefix}".rstrip("/")
        base = f"s3://{reference.bucket}/{prefix}"
        name = writing.model_name(PurePosixPath(reference.key.rstrip("/")).stem)

        def sources(variant: Variant) -> tuple[SourceFile, ...]:
            return tuple(
                SourceFile(f"{folder}/{file.path}", f"{base}{file.path}", file.size) for file in variant.files
            )

        header, problem = None, ""
        if (first := next((each for each in found if each.format == "gguf"), None)) is not None:
            header, problem = await self._gguf_header(sources(first)[0])
        context = probing.trained_context(header)

        def build_choice(variant: Variant) -> Choice:
            settings = writing.definition_of(name, variant, folder, context=context)
            is_gguf = variant.format == "gguf"
            return Choice(variant, settings, sources(variant), header if is_gguf else None, context)

        choices = tuple(map(build_choice, found))
        return SourceModel("s3", address, address, name, choices, task="chat", problem=problem)

    async def _find_on_share(self, path: str) -> SourceModel:
        shared = await shares.read_share(self._settings, path)
        name = writing.model_name(PurePosixPath(path.rstrip("/")).stem)
        choices = []
        for variant in shared.variants:
            settings = writing.definition_of(name, variant, shared.folder)
            header = shared.headers.get(variant.id)
            choices.append(Choice(variant, settings, (), header, probing.trained_context(header)))
        return SourceModel(
            "folder", shared.folder, f"share://{shared.folder}", name, tuple(choices), task="chat"
        )

    async def _find_in_gallery(self, entry: GalleryEntry) -> SourceModel:
        plan = await galleries.plan_of(entry, self.outbound)
        files, problem = await self._add_sizes(await self.hub.pin_files(plan.files))
        definition = writing.check_text(plan.text)
        main = next((file for file in files if file.path == definition.model), None)
        header = None
        if main is not None and main.path.endswith(".gguf") and main.size:
            header, unreadable = await self._gguf_header(main)
            problem = unreadable or problem
        variant = _entry_variant(files, definition.model, str(definition.options.get("MMProj") or ""), entry)
        choice = Choice(
            variant, writing.settings_of(plan.text), files, header, probing.trained_context(header)
        )
        return SourceModel(
            "gallery",
            plan.source,
            plan.source,
            plan.name,
            (choice,),
            description=entry.description,
            licence=entry.license,
            urls=entry.urls,
            icon=entry.icon,
            task=galleries.task_of(entry),
            problem=problem,
            origin="gallery",
        )

    async def _parse_definition(self, text: str, source: str) -> SourceModel:
        """Return the model of a definition; its `download_files` name the files."""
        definition = writing.check_text(text)
        settings = writing.settings_of(text)
        files = await self.hub.pin_files(galleries.files_of_definition(settings))
        variant = _variant_of_files(files, definition.model)
        return SourceModel(
            "definition",
            definition.name,
            source,
            definition.name,
            (Choice(variant, settings, files),),
            task=next(iter(definition.use_cases), ""),
        )

    async def _add_sizes(self, files: Sequence[SourceFile]) -> tuple[tuple[SourceFile, ...], str]:
        """Return the files with the sizes that their sources report, and the first problem."""

        async def size(file: SourceFile) -> tuple[SourceFile, str]:
            try:
                _, total = await probing.read_start(self.opener, file, 1)
                return replace(file, size=total or file.size), ""
            except SourceError as error:
                return file, error.message

        sized = await asyncio.gather(*map(size, files[:MAX_PROBED]))
        problem = next((problem for _, problem in sized if problem), "")
        return (*(file for file, _ in sized), *files[MAX_PROBED:]), problem


def _variant_of_files(files: Sequence[SourceFile], model: str, projector: str = "") -> Variant:
    listed = tuple(RepositoryFile(file.path, file.size, file.sha256) for file in files)
    weights = sum(file.size for file in files if file.path != projector)
    beside = sum(file.size for file in files if file.path == projector)
    quantization = variants.quantization_of(model)
    return Variant(quantization or "default", "file", quantization, listed, model, projector, weights, beside)


def _entry_variant(files: Sequence[SourceFile], model: str, projector: str, entry: GalleryEntry) -> Variant:
    """Return the variant of a gallery entry; if no source reports a size, use the size from the gallery."""
    variant = _variant_of_files(files, model, projector)
    stated = galleries.bytes_of(entry)
    return variant if variant.weights or not stated else replace(variant, weights=stated)


def _single_file_variant(file_name: str, size: int) -> Variant:
    quantization = variants.quantization_of(file_name)
    kind = "gguf" if file_name.lower().endswith(".gguf") else "file"
    files = (RepositoryFile(file_name, size),)
    return Variant(quantization or file_name, kind, quantization, files, file_name, weights=size)


def _variants(files: Sequence[RepositoryFile], path: str) -> list[Variant]:
    """Return the variants; add the file at `path` if it is whisper's and in no variant."""
    listed = variants_of(files)
    named = next((file for file in files if file.path == path), None)
    is_whisper = named is not None and named.path.rpartition("/")[2].startswith(_WHISPER_FILE_PREFIX)
    if named is not None and is_whisper and variants.select(listed, path) is None:
        return [*listed, replace(_single_file_variant(named.path, named.size), files=(named,))]
    return listed


def _hub_file(repository: Repository, folder: str, file: RepositoryFile) -> SourceFile:
    address = f"hf://{repository.id}@{repository.commit}/{file.path}"
    return SourceFile(f"{folder}/{file.path}", address, file.size, file.sha256)


def _no_variant(model: str, wanted: str, listed: Sequence[Variant]) -> InvalidInput:
    offered = ", ".join(variant.id for variant in listed[:20]) or "none"
    shown = names.to_single_line(wanted[:100])
    return InvalidInput(f"{model} has no variant {shown!r}; it has: {offered}", field="variant")


def select_choice(found: SourceModel, wanted: str) -> Choice | None:
    """Return the choice with this variant, None if `wanted` is empty; raise InvalidInput if it is unknown."""
    if not wanted:
        return None
    listed = [choice.variant for choice in found.choices]
    variant = variants.select(listed, wanted)
    if variant is None:
        raise _no_variant(found.title, wanted, listed)
    return found.choices[listed.index(variant)]


@dataclass(frozen=True)
class Suggestion:
    """A model that a search term may mean. Pasting `text` selects the model."""

    text: str
    title: str
    kind: str
    description: str = ""
    size: int = 0
