"""Hugging Face: metadata and files of repositories, each pinned to a commit, and the search of models.

The JSON API of the hub is called through `Outbound`, not through the package `huggingface_hub`. That package
has one HTTP client for the whole process, follows redirects by its own rules, reads responses of any length,
and takes its token from files and variables that are not settings of this product (docs/decisions/0034).

The size of responses is limited, and only the declared fields are read.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from localai_cluster.kit import names, untrusted
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.kit.outbound import Outbound, SourceError, SourceMissing, SourceRefused
from nodes.sources import plans
from nodes.sources.opening import HUB
from nodes.sources.plans import SourceFile
from nodes.sources.references import HubRef
from nodes.sources.variants import RepositoryFile

MAX_BYTES = 16 * 1024 * 1024
"""Maximum bytes of a response; a repository of ten thousand files needs a quarter of it."""
MAX_FILES = 10_000
"""Maximum files of a repository."""
MAX_REPOSITORIES = 16
"""Maximum repositories that one gallery entry may name by branches or tags."""
MAX_RESULTS = 20

_MAX_TEXT_LENGTH = 300


class _Lfs(msgspec.Struct, frozen=True):
    sha256: str = ""
    size: int = 0


class _Sibling(msgspec.Struct, frozen=True):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Card(msgspec.Struct, frozen=True):
    license: str | list[str] | None = None
    license_name: str | None = None


class _Repository(msgspec.Struct, frozen=True):
    id: str
    sha: str = ""
    gated: bool | str = False
    disabled: bool = False
    pipeline_tag: str = ""
    tags: list[str] = []
    downloads: int = 0
    card: _Card | None = msgspec.field(default=None, name="cardData")
    siblings: list[_Sibling] = []


@dataclass(frozen=True)
class Repository:
    """A repository at one commit."""

    id: str
    commit: str
    files: tuple[RepositoryFile, ...]
    gated: bool
    task: str
    licence: str
    downloads: int = 0


class Hub:
    """The API of the hub, or of a mirror, at `endpoint`."""

    def __init__(self, outbound: Outbound, endpoint: str, *, has_token: bool) -> None:
        self._outbound = outbound
        self._endpoint = endpoint
        self._has_token = has_token

    async def repository(self, reference: HubRef) -> Repository:
        """Return the repository at the current commit of its revision; raise SourceError."""
        revision = quote(reference.revision or "main", safe="")
        address = f"{self._endpoint}/api/models/{reference.repo}/revision/{revision}?blobs=true"
        try:
            found = _decode_response(
                await self._outbound.read(address, MAX_BYTES), _Repository, reference.repo
            )
        except (SourceRefused, SourceMissing) as error:
            raise self._explain_refusal(error, reference) from error
        if found.disabled:
            raise SourceRefused(f"{reference.repo} is disabled at its source")
        return _convert_repository(found)

    async def pin_files(self, files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
        """Pin files that a branch or tag names to its current commit, with size and hash; return all files.

        One request for each repository and revision. Raise SourceError, and InvalidInput for more than
        `MAX_REPOSITORIES`.
        """
        places = {
            file.url: place for file in files if (place := _parse_unpinned_address(file.url)) is not None
        }
        wanted = {HubRef(place.repo, place.revision) for place in places.values()}
        if len(wanted) > MAX_REPOSITORIES:
            reason = f"it has files of {len(wanted)} repositories; at most {MAX_REPOSITORIES} are read"
            raise InvalidInput(reason, field="text")
        ordered = sorted(wanted, key=str)
        found = dict(zip(ordered, await asyncio.gather(*map(self.repository, ordered)), strict=True))
        return tuple(
            file
            if (place := places.get(file.url)) is None
            else _pin_to_commit(file, place, found[HubRef(place.repo, place.revision)])
            for file in files
        )

    async def search(self, term: str) -> list[Repository]:
        """Return the repositories that match the term, the most downloaded first; raise SourceError."""
        query = urlencode({"search": term, "sort": "downloads", "direction": "-1", "limit": MAX_RESULTS})
        body = await self._outbound.read(f"{self._endpoint}/api/models?{query}", MAX_BYTES)
        found = _decode_response(body, list[_Repository], term)
        return [_convert_repository(each) for each in found[:MAX_RESULTS]]

    def _explain_refusal(self, error: SourceError, reference: HubRef) -> SourceError:
        """Explain a refusal: the hub responds with 401 for private and for missing repositories."""
        if isinstance(error, SourceMissing) or not self._has_token:
            revision = f" with revision {reference.revision}" if reference.revision else ""
            hint = "" if self._has_token else "; if it is private, the server needs HF_TOKEN"
            return SourceMissing(f"there is no repository {reference.repo}{revision}{hint}")
        return error


def _parse_unpinned_address(url: str) -> HubRef | None:
    """Parse an hf:// address; return None if it is another address or already names a commit."""
    if not url.startswith(HUB):
        return None
    repo, _, rest = url.removeprefix(HUB).partition("@")
    revision, _, path = rest.partition("/")
    return None if _is_commit(revision) else HubRef(repo, revision, path)


def _pin_to_commit(file: SourceFile, place: HubRef, repository: Repository) -> SourceFile:
    listed = next((each for each in repository.files if each.path == place.path), None)
    if listed is None:
        raise SourceMissing(f"{names.to_single_line(str(place)[:200])} does not exist")
    address = f"{HUB}{place.repo}@{repository.commit}/{place.path}"
    return replace(file, url=address, size=listed.size, sha256=file.sha256 or listed.sha256)


def _decode_response(body: bytes, kind: Any, subject: str) -> Any:
    """Decode the JSON of a response as `kind`; raise SourceError."""
    if problem := untrusted.json_problem(body):
        raise SourceError(f"{subject}: the answer is {problem}")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SourceError(f"{subject}: the answer cannot be read: {str(error)[:200]}") from None


def _convert_repository(found: _Repository) -> Repository:
    if len(found.siblings) > MAX_FILES:
        count = len(found.siblings)
        raise InvalidInput(f"{found.id} has {count} files; at most {MAX_FILES} are listed", field="text")
    commit = found.sha if _is_commit(found.sha) else ""
    if found.siblings and not commit:
        raise SourceError(f"{found.id}: the answer names no commit")
    return Repository(
        _displayable_text(found.id),
        commit,
        tuple(
            _convert_file(sibling)
            for sibling in found.siblings
            if not names.find_unprintable(sibling.rfilename)
        ),
        bool(found.gated),
        _displayable_text(found.pipeline_tag),
        _licence(found.card or _Card(), found.tags),
        found.downloads,
    )


def _convert_file(sibling: _Sibling) -> RepositoryFile:
    """Return a file with the size of its content, not of its LFS pointer."""
    size = sibling.lfs.size if sibling.lfs is not None else sibling.size or 0
    sha256 = sibling.lfs.sha256.lower() if sibling.lfs is not None else ""
    return RepositoryFile(sibling.rfilename, size if 0 <= size < plans.MAX_BYTES else 0, sha256)


def _is_commit(text: str) -> bool:
    return len(text) == 40 and all(character in "0123456789abcdef" for character in text)


def _licence(card: _Card, tags: Sequence[str]) -> str:
    stated = _first_text(card.license)
    if stated == "other" and card.license_name:
        stated = card.license_name
    tagged = next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), "")
    return _displayable_text(stated or tagged)


def _first_text(value: str | list[str] | None) -> str:
    return (value[0] if value else "") if isinstance(value, list) else value or ""


def _displayable_text(text: str) -> str:
    return names.to_single_line(text[:_MAX_TEXT_LENGTH])
