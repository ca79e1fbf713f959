"""The catalogue: all entries of model galleries, and whether each is installed, being imported, or fits.

The number of queries is the same for any number of entries: one for operations, four for the fleet.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import datetime

from asgiref.sync import async_to_sync

from localai_cluster.gallery_index import GalleryEntry, folded
from localai_cluster.kit.errors import Unavailable
from localai_cluster.web import shapes
from nodes.backends.catalogue import Offer
from nodes.definitions.folder import folder
from nodes.loading.files_in_use import IMPORT
from nodes.sources import fits, galleries
from operations.models import Operation

ENTRY = shapes.Shape(
    "CatalogueModel",
    "A model that a gallery offers.",
    [
        shapes.field(
            "id",
            shapes.TEXT,
            "`gallery@name`, which can be inspected and imported.",
            example="localai@qwen2.5-1.5b-instruct",
        ),
        shapes.field("name", shapes.TEXT, example="qwen2.5-1.5b-instruct"),
        shapes.field("gallery", shapes.TEXT, example="localai"),
        shapes.field("description", shapes.TEXT, "Markdown.", example="A small model that chats."),
        shapes.field("icon", shapes.TEXT, example=""),
        shapes.field("licence", shapes.TEXT, example="apache-2.0"),
        shapes.field("tags", shapes.TEXTS, example=["llm", "gguf"]),
        shapes.field(
            "task", shapes.TEXT, "What it is for; empty if its gallery does not say it.", example="chat"
        ),
        shapes.field("size", shapes.BYTES, "0 if its gallery does not say it.", example=1117320736),
        shapes.field("installed", shapes.FLAG, "A model of this name is defined.", example=False),
        shapes.field("jobID", shapes.TEXT, "The import under way; empty if there is none.", example=""),
        shapes.field(
            "fits", shapes.FLAG, "On any node; null if it is not known.", example=True, nullable=True
        ),
    ],
)


@dataclass(frozen=True)
class Query:
    """Filter and page of the catalogue; texts are case-folded."""

    term: str = ""
    task: str = ""
    licence: str = ""
    gallery: str = ""
    most_bytes: int = 0
    """Maximum size in bytes; 0 = any. A positive limit excludes models of unknown size."""
    fits: bool = False
    page: int = 1
    items: int = 50


@dataclass(frozen=True)
class CataloguePage:
    """A page of the catalogue, and the values of all entries by which it can be filtered."""

    rows: list[shapes.Row]
    total: int
    tasks: list[str]
    licences: list[str]
    galleries: list[str]
    offer: Offer = field(default_factory=Offer)


def read(query: Query, now: datetime) -> CataloguePage:
    """Return a page; raise Unavailable if no gallery can be read."""
    offer = readable_offer()
    fleet = fits.read_fleet(now)
    tasks = {id(entry): galleries.task_of(entry) for entry in offer.builds}
    matching = [entry for entry in offer.builds if _matches(entry, tasks[id(entry)], query, fleet.fits_size)]
    first = (query.page - 1) * query.items
    page = matching[first : first + query.items]
    installed, jobs = installed_names(), active_imports()
    rows = [_row(entry, tasks[id(entry)], installed, jobs, fleet) for entry in page]
    return CataloguePage(
        rows,
        len(matching),
        sorted({task for task in tasks.values() if task}),
        sorted({entry.license for entry in offer.builds if entry.license}),
        sorted({entry.gallery.name for entry in offer.builds}),
        offer,
    )


def readable_offer() -> Offer:
    """Return the entries of the galleries; raise Unavailable if no gallery can be read."""
    offer, configured = galleries.offer(), galleries.configured()
    if configured and len(offer.problems) == len(configured) and not offer.copied_at:
        raise Unavailable("; ".join(offer.problems.values()))
    return offer


def _matches(entry: GalleryEntry, task: str, query: Query, fits_size: Callable[[int], bool | None]) -> bool:
    size = galleries.bytes_of(entry)
    return (
        (not query.task or query.task == task.casefold())
        and (not query.licence or query.licence == entry.license.casefold())
        and (not query.gallery or query.gallery == entry.gallery.name.casefold())
        and (not query.most_bytes or 0 < size <= query.most_bytes)
        and (not query.term or query.term in searchable_text(entry))
        and (not query.fits or fits_size(size) is True)
    )


def searchable_text(entry: GalleryEntry) -> str:
    """Return the case-folded texts of an entry that a search term is compared with."""
    return "\n".join((entry.name, entry.description, entry.gallery.name, *entry.tags)).casefold()


def _row(
    entry: GalleryEntry,
    task: str,
    installed: Collection[str],
    jobs: dict[str, str],
    fleet: fits.FleetFit,
) -> shapes.Row:
    size = galleries.bytes_of(entry)
    return ENTRY.of_object(
        entry,
        id=entry_id(entry),
        gallery=entry.gallery.name,
        licence=entry.license,
        tags=list(entry.tags),
        task=task,
        size=size,
        installed=folded(entry.name) in installed,
        jobID=jobs.get(folded(entry.name), ""),
        fits=fleet.fits_size(size),
    )


def entry_id(entry: GalleryEntry) -> str:
    """Return the id by which an entry is imported: `gallery@name`."""
    return f"{entry.gallery.name}@{entry.name}"


def installed_names() -> set[str]:
    """Return the case-folded names of all defined models."""
    return {folded(definition.name) for definition in async_to_sync(folder().all)()}


def active_imports() -> dict[str, str]:
    """Return the id of each active import, by the model's case-folded name. One query."""
    rows = Operation.objects.active().filter(kind=IMPORT).order_by().values_list("element", "id")
    return {folded(element): str(id) for element, id in rows}
