"""Inspection of a pasted text, and the plan of its import.

Both read the source again, so a plan never depends on what a page showed earlier. The database is read before
and after the source, never while a request to the source runs.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from asgiref.sync import async_to_sync

from localai_cluster.gallery_index import GalleryEntry
from localai_cluster.kit import conf, names, transactions
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.kit.outbound import SourceError
from localai_cluster.web.shapes import BYTES, FLAG, TEXT, TEXTS, Row, Shape, count, field
from nodes.definitions import store
from nodes.definitions.sizes import ModelFiles
from nodes.loading.load_request import estimate_need
from nodes.sources import fits, galleries, variants, writing
from nodes.sources.finding import Choice, SourceFinder, SourceModel, Suggestion, select_choice
from nodes.sources.hub import Repository
from nodes.sources.plans import ImportPlan
from nodes.sources.references import GalleryRef, NameRef, Reference, recognise

KINDS = ("huggingface", "gallery", "ollama", "oci", "https", "s3", "folder", "definition", "search")
MAX_CANDIDATES = 20
"""Candidates of each kind."""
_TAGGED_NAME_PATTERN = re.compile(r"[\w.-]+:[\w.-]+", re.ASCII)

_KIND_SCHEMA = {"type": "string", "enum": list(KINDS)}

FILE = Shape(
    "VariantFile",
    "A file of a variant.",
    [
        field("path", TEXT, example="qwen2.5-1.5b-instruct-q4_k_m.gguf"),
        field("size", BYTES, example=1117320736),
    ],
)
VARIANT = Shape(
    "ModelVariant",
    "One way to run a model.",
    [
        field("id", TEXT, "For `variant` of an import.", example="Q4_K_M"),
        field("label", TEXT, example="Q4_K_M"),
        field("quantization", TEXT, example="Q4_K_M"),
        field("size", BYTES, "Of all its files; 0 if unknown.", example=1117320736),
        field("files", FILE.many, "At most 200."),
        field("licence", TEXT, example="apache-2.0"),
        field("gated", FLAG, "Its source asks for consent to a licence.", example=False),
        field("recommended", FLAG, example=True),
        field("context_size", count(), "Tokens that the model was made for; 0 if unknown.", example=32768),
        field("fit", fits.FIT.ref),
    ],
)
CANDIDATE = Shape(
    "ModelCandidate",
    "A model that a name may mean.",
    [
        field("text", TEXT, "To be inspected instead of the name."),
        field("title", TEXT),
        field("kind", _KIND_SCHEMA),
        field("description", TEXT),
        field("size", BYTES, "0 if unknown."),
    ],
)
INSPECTION = Shape(
    "SourceInspection",
    "What a pasted text means.",
    [
        field("kind", _KIND_SCHEMA, example="huggingface"),
        field("title", TEXT, example="Qwen/Qwen2.5-1.5B-Instruct-GGUF"),
        field("description", TEXT, example=""),
        field("licence", TEXT, example="apache-2.0"),
        field("gated", FLAG, example=False),
        field("urls", TEXTS, example=["https://huggingface.co/Qwen/Qwen2.5-1.5B-Instruct-GGUF"]),
        field("icon", TEXT, example=""),
        field("commit", TEXT, example="91cad51170dc346986eccefdc2dd33a9da36ead9"),
        field("name", TEXT, "The suggested name of the model.", example="Qwen2.5-1.5B-Instruct"),
        field("task", TEXT, example="chat"),
        field("variants", VARIANT.many),
        field("candidates", CANDIDATE.many, example=[]),
        field("problem", TEXT, "What could not be found out.", example=""),
    ],
)
_MAX_SHOWN_VARIANTS = 200
_WEB_PREFIXES = ("https://", "http://")
"""Prefixes of the addresses that a page may link to."""


def inspect(text: str, now: datetime) -> Row:
    """Return the model that the text names, with its variants. Raise InvalidInput or SourceError."""
    reference = _parse_reference(text)
    if isinstance(reference, NameRef):
        return _search(reference)
    found = _find(reference)
    fleet = fits.read_fleet(now)
    rows = [_fit_choice(fleet, choice) for choice in found.choices]
    fitting = [
        choice.variant.id for choice, fit in zip(found.choices, rows, strict=True) if fit["fits"] is not False
    ]
    best = found.wanted or variants.recommend((choice.variant for choice in found.choices), fitting)
    return INSPECTION.of_object(
        found,
        title=names.to_single_line(found.title[:300]),
        urls=[url for url in found.urls if url.startswith(_WEB_PREFIXES)],
        icon=found.icon if found.icon.startswith(_WEB_PREFIXES) else "",
        variants=[
            _variant(found, choice, fit, is_best=choice.variant.id == best)
            for choice, fit in zip(found.choices, rows, strict=True)
        ],
        candidates=[],
    )


def plan_import(
    text: str, *, variant: str = "", name: str = "", changes: Mapping[str, Any] | None = None, now: datetime
) -> ImportPlan:
    """Return the plan that imports the model of the text. Raise InvalidInput or SourceError.

    An unknown variant is an error and never replaced by another one. An empty `variant` selects the best
    variant that fits.
    """
    reference = _parse_reference(text)
    if isinstance(reference, NameRef):
        raise InvalidInput(
            f"text: {names.to_single_line(reference.term)!r} may mean several models:"
            " inspect it and choose one",
            field="text",
        )
    found = _find(reference)
    return plan_of(found, variant=variant, name=name, changes=changes, now=now)


def plan_of(
    found: SourceModel,
    *,
    variant: str = "",
    name: str = "",
    changes: Mapping[str, Any] | None = None,
    now: datetime,
) -> ImportPlan:
    """Return the plan that imports a variant of the inspected model."""
    if not found.choices:
        raise InvalidInput(f"text: {found.problem or 'it has nothing that could be run'}", field="text")
    choice = select_choice(found, variant or found.wanted) or _best_choice(found, now)
    return found.plan(choice, name or found.name, changes)


def plan_entry(entry: GalleryEntry, *, variant: str = "", name: str = "") -> ImportPlan:
    """Return the plan that imports an entry of a gallery; raise InvalidInput or SourceError."""
    found = _read_source(entry)
    choice = select_choice(found, variant) or found.choices[0]
    return found.plan(choice, name or found.name)


def estimate_entry(entry: GalleryEntry, contexts: Sequence[int]) -> tuple[int, dict[int, int], int]:
    """Return the size of an entry, its memory by context length in tokens, and the trained context length."""
    choice = _read_source(entry).choices[0]
    files, memory = _files_of(choice), {}
    for context in contexts:
        definition = writing.check_text(writing.text_of({**choice.settings, "context_size": context}))
        memory[context] = estimate_need(definition, files).vram
    return files.payload, memory, choice.context


def is_defined(name: str) -> bool:
    """Return True if a definition has this name, even a disabled or unusable definition."""
    return store.find(name) is not None or bool(store.file_of(name))


def _best_choice(found: SourceModel, now: datetime) -> Choice:
    listed = [choice.variant for choice in found.choices]
    if len(listed) == 1:
        return found.choices[0]
    fleet = fits.read_fleet(now)
    fitting = [
        choice.variant.id for choice in found.choices if _fit_choice(fleet, choice)["fits"] is not False
    ]
    best = variants.recommend(listed, fitting)
    return next(choice for choice in found.choices if choice.variant.id == best)


def _parse_reference(text: str) -> Reference:
    return recognise(text, mirror=conf.cluster().hugging_face_url)


def _find(reference: Reference) -> SourceModel:
    return _read_source(galleries.find(reference) if isinstance(reference, GalleryRef) else reference)


def _read_source(reference: Reference | GalleryEntry) -> SourceModel:
    """Read a source without holding a database connection."""
    transactions.release_connection()
    return async_to_sync(SourceFinder(conf.cluster()).find)(reference)


def _fit_choice(fleet: fits.FleetFit, choice: Choice) -> Row:
    """Return the nodes that a choice fits on, with the definition that its import would save."""
    return fleet.fit(writing.check_text(writing.text_of(choice.settings)), _files_of(choice))


def _files_of(choice: Choice) -> ModelFiles:
    variant = choice.variant
    return ModelFiles(variant.weights, variant.size or variant.weights, choice.header, variant.projector_size)


def _variant(found: SourceModel, choice: Choice, fit: Row, *, is_best: bool) -> Row:
    variant = choice.variant
    return VARIANT.of_object(
        found,
        id=variant.id,
        label=variant.quantization or variant.id,
        quantization=variant.quantization,
        size=variant.size or variant.weights,
        files=[FILE.of(path=file.path, size=file.size) for file in variant.files[:_MAX_SHOWN_VARIANTS]],
        recommended=is_best,
        context_size=choice.context,
        fit=fit,
    )


def _search(reference: NameRef) -> Row:
    """Return the models that a search term matches: gallery entries first, then repositories of the hub."""
    offer = galleries.offer()
    candidates = list(_search_galleries(offer.builds, reference.term))[:MAX_CANDIDATES]
    if _TAGGED_NAME_PATTERN.fullmatch(reference.term):
        candidates.append(
            Suggestion(f"ollama://{reference.term}", reference.term, "ollama", "In the registry of Ollama.")
        )
    problems = list(offer.problems.values())
    transactions.release_connection()
    try:
        repositories = async_to_sync(SourceFinder(conf.cluster()).hub.search)(reference.term)
    except SourceError as error:
        problems.append(error.message)
    else:
        candidates += map(_hub_suggestion, repositories)
    return INSPECTION.of(
        **dict.fromkeys(("description", "licence", "icon", "commit", "name", "task"), ""),
        kind="search",
        title=reference.term,
        gated=False,
        urls=[],
        variants=[],
        candidates=[CANDIDATE.of(**vars(candidate)) for candidate in candidates],
        problem="; ".join(problems),
    )


def _search_galleries(entries: Sequence[Any], term: str) -> list[Suggestion]:
    """Return the entries whose name, tags or description contain the term; matches of the name come first."""
    folded = term.casefold()
    ranked = []
    for entry in entries:
        name = entry.name.casefold()
        texts = (name == folded, name.startswith(folded), folded in name)
        if any(texts) or any(folded in text.casefold() for text in (entry.description, *entry.tags)):
            ranked.append(([not each for each in texts], entry))
    ranked.sort(key=lambda pair: pair[0])
    return [
        Suggestion(
            f"{entry.gallery.name}@{entry.name}",
            entry.name,
            "gallery",
            entry.description[:300],
            galleries.bytes_of(entry),
        )
        for _, entry in ranked[:MAX_CANDIDATES]
    ]


def _hub_suggestion(repository: Repository) -> Suggestion:
    facts = (repository.task, repository.licence, f"{repository.downloads} downloads a month")
    return Suggestion(
        f"hf://{repository.id}", repository.id, "huggingface", ", ".join(fact for fact in facts if fact)
    )
