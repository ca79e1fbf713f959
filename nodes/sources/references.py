"""Parse a pasted text: a repository, a file, an image, a gallery entry, a definition or a name.

Pure: nothing is looked up. Users paste an address, a name, the link of a page, or the command line of another
program. A text that cannot be any of these raises InvalidInput; a plain word is a name to search for.
"""

import re
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from localai_cluster.kit import errors, names
from localai_cluster.registries import references as images
from nodes.definitions.files import MAX_FILE_BYTES

MAX_LINE_LENGTH = 2048
MAX_TERM_LENGTH = 200
HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
OLLAMA_REGISTRY = "registry.ollama.ai"
_HUB_SCHEMES = ("huggingface://", "hf://")
_NAME_PART_PATTERN = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REVISION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_REPOSITORY_PATTERN = re.compile(
    rf"(?P<repo>{_NAME_PART_PATTERN}/{_NAME_PART_PATTERN})(?:@(?P<revision>{_REVISION_PATTERN}))?(?::(?P<quantization>[A-Za-z0-9._-]{{1,64}}))?"
    r"(?:/(?P<path>[^?#]+))?"
)
_OLLAMA_NAME_PATTERN = re.compile(
    rf"(?:(?P<owner>{_NAME_PART_PATTERN})/)?(?P<name>{_NAME_PART_PATTERN})(?::(?P<tag>[\w][\w.-]{{0,127}}))?",
    re.ASCII,
)
_GALLERY_ENTRY_PATTERN = re.compile(
    r"(?P<gallery>[A-Za-z0-9][\w.-]{0,99})@(?P<name>[^\s@/\\][^\s@\\]{0,199})"
)
_S3_URL_PATTERN = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<key>[^?#]{1,1024})")
_COMMAND_LINE_PATTERN = re.compile(
    r"(?:\$\s*)?(?:sudo\s+)?(?:"
    r"ollama\s+(?:run|pull|show)\s+(?P<ollama>\S+)"
    r"|(?:docker\s+model|lms)\s+(?:run|pull|get)\s+(?P<docker>\S+)"
    r"|(?:huggingface-cli|hf)\s+download\s+(?P<download>\S+)(?:\s+(?P<file>[^\s-]\S*))?"
    r"|(?:vllm\s+serve|local-ai\s+(?:run|models\s+install))\s+(?P<served>\S+)"
    r"|(?:llama-(?:server|cli)|llama\s+serve)\s.*?(?:-hf|-hfr|--hf-repo)[\s=]+(?P<llama>\S+).*"
    r")(?:\s.*)?"
)
_DEFINITION_KEY_PATTERN = re.compile(r"(?m)^[\"']?(?:name|backend|parameters)[\"']?\s*:")
_HUB_PATH_KINDS = {
    "datasets": "a data set",
    "spaces": "a Space",
    "papers": "a paper",
    "collections": "a collection",
}


@dataclass(frozen=True)
class HubRef:
    """A repository of Hugging Face, one of its files, or one of its quantizations."""

    repo: str
    revision: str = ""
    path: str = ""
    quantization: str = ""

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf://{self.repo}{revision}" + (f"/{self.path}" if self.path else "")


@dataclass(frozen=True)
class GalleryRef:
    """An entry of a gallery."""

    gallery: str
    name: str


@dataclass(frozen=True)
class ImageRef:
    """A model in a registry: a model of Ollama, or an OCI artifact."""

    reference: images.ImageReference
    is_ollama: bool

    @property
    def name(self) -> str:
        """The model's name as users know it: without `library/` and without Ollama's registry."""
        path = self.reference.path.removeprefix("library/")
        known = self.reference.host == OLLAMA_REGISTRY
        return f"{path if known else f'{self.reference.host}/{path}'}:{self.reference.version}"


@dataclass(frozen=True)
class WebRef:
    """A file at a web address."""

    url: str


@dataclass(frozen=True)
class ObjectRef:
    """A file in an object store."""

    bucket: str
    key: str


@dataclass(frozen=True)
class SharedRef:
    """A file or folder of a share."""

    path: str


@dataclass(frozen=True)
class DefinitionRef:
    """The complete text of a definition."""

    text: str


@dataclass(frozen=True)
class NameRef:
    """A name to search for."""

    term: str


Reference = HubRef | GalleryRef | ImageRef | WebRef | ObjectRef | SharedRef | DefinitionRef | NameRef


def recognise(text: str, *, mirror: str = "") -> Reference:
    """Parse the text; `mirror` is the URL of a mirror of Hugging Face. Raise InvalidInput."""
    text = text.strip()
    if not text:
        raise _invalid_text("is required")
    if "\n" in text or _DEFINITION_KEY_PATTERN.match(text):
        return _parse_definition(text)
    if len(text) > MAX_LINE_LENGTH:
        raise _invalid_text(f"has more than {MAX_LINE_LENGTH} characters on one line")
    if character := names.find_unprintable(text):
        raise _invalid_text(f"must not contain the character {character}")
    if (command := _COMMAND_LINE_PATTERN.fullmatch(text)) is not None:
        return _parse_command(command, mirror)
    return _parse_line(text.strip("\"'`<>"), mirror)


def _parse_definition(text: str) -> DefinitionRef:
    if len(text.encode("utf-8", "replace")) > MAX_FILE_BYTES:
        raise _invalid_text(f"is longer than {MAX_FILE_BYTES} bytes")
    if not _DEFINITION_KEY_PATTERN.search(text):
        raise _invalid_text("has several lines and is no definition: paste one name, address or definition")
    return DefinitionRef(text)


def _parse_command(command: re.Match[str], mirror: str) -> Reference:
    if model := command["ollama"]:
        return (
            _parse_line(model, mirror)
            if model.startswith(("hf.co/", "huggingface.co/"))
            else _parse_ollama_name(model)
        )
    if model := command["docker"]:
        return _parse_line(
            model if "/" not in model or "." in model.split("/")[0] else f"oci://{model}", mirror
        )
    if repo := command["download"]:
        return _parse_repository(f"{repo}/{command['file']}" if command["file"] else repo)
    return _parse_line(command["llama"] or command["served"], mirror)


def _parse_line(text: str, mirror: str) -> Reference:
    scheme = text.partition("://")[0].lower() if "://" in text else ""
    if scheme in ("http", "https"):
        return _parse_url(text, mirror)
    if text.lower().startswith(_HUB_SCHEMES):
        return _parse_repository(text.partition("://")[2])
    if text.startswith(tuple(f"{host}/" for host in HUB_HOSTS)):
        return _parse_hub_path(text.partition("/")[2])
    if scheme == "ollama":
        return _parse_ollama_name(text.partition("://")[2])
    if scheme in ("oci", "docker"):
        return _parse_image(text)
    if scheme == "s3":
        return _parse_object(text)
    if scheme in ("file", "share") or text.startswith("/"):
        return SharedRef(unquote(text.partition("://")[2]) if scheme else text)
    if scheme:
        raise _invalid_text(f"has the scheme {scheme[:20]!r}, which is no source of models")
    return _parse_word(text)


def _parse_word(text: str) -> Reference:
    if (entry := _GALLERY_ENTRY_PATTERN.fullmatch(text)) is not None:
        return GalleryRef(entry["gallery"], entry["name"])
    if "/" in text:
        return _parse_repository(text)
    if len(text) > MAX_TERM_LENGTH:
        raise _invalid_text(f"is a name of more than {MAX_TERM_LENGTH} characters")
    return NameRef(text)


def _parse_url(url: str, mirror: str) -> Reference:
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise _invalid_text("is a malformed address") from None
    if not host:
        raise _invalid_text("is an address without a host")
    if parts.username is not None or parts.password is not None:
        raise _invalid_text(
            "has a user name or password in the address: set a credential of the server instead"
        )
    if mirror and url.startswith(f"{mirror}/"):
        return _parse_hub_path(parts.path.removeprefix(urlsplit(mirror).path))
    if host in HUB_HOSTS:
        return _parse_hub_path(parts.path.strip("/"))
    if host in ("ollama.com", "www.ollama.com", "ollama.ai"):
        return _parse_ollama_name(parts.path.strip("/").removeprefix("library/"))
    return WebRef(url.partition("#")[0])


def _parse_hub_path(path: str) -> HubRef:
    """Return the repository or file that the path of a hub page names."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if len(parts) > 1 and parts[0] in _HUB_PATH_KINDS:
        raise _invalid_text(f"is the address of {_HUB_PATH_KINDS[parts[0]]}, not of a model")
    if parts[:1] == ["models"] and len(parts) > 2:
        parts = parts[1:]
    if len(parts) > 3 and parts[2] in ("blob", "resolve", "tree", "raw"):
        found = _parse_repository("/".join(parts[:2]))
        is_file = parts[2] != "tree" and len(parts) > 4
        return HubRef(
            found.repo, _check_revision(parts[3]), _check_path("/".join(parts[4:])) if is_file else ""
        )
    return _parse_repository(
        "/".join(parts[:2] if len(parts) > 2 and parts[2] in ("tree", "discussions") else parts)
    )


def _parse_repository(text: str) -> HubRef:
    match = _REPOSITORY_PATTERN.fullmatch(text.strip("/"))
    if match is None or not {".", ".."}.isdisjoint(match["repo"].split("/")) or ".." in match["repo"]:
        raise _invalid_text(f"is not a repository such as owner/name: {names.to_single_line(text[:100])!r}")
    path = _check_path(match["path"]) if match["path"] else ""
    return HubRef(match["repo"], match["revision"] or "", path, match["quantization"] or "")


def _check_revision(text: str) -> str:
    if not re.fullmatch(_REVISION_PATTERN, text):
        raise _invalid_text(
            f"has a revision that is no commit, branch or tag: {names.to_single_line(text[:60])!r}"
        )
    return text


def _check_path(text: str) -> str:
    if not {"", ".", ".."}.isdisjoint(text.split("/")) or "\\" in text or len(text) > 1024:
        raise _invalid_text("has the path of a file that leads out of its repository")
    if character := names.find_unprintable(text):
        raise _invalid_text(f"must not contain the character {character}")
    return text


def _parse_ollama_name(text: str) -> ImageRef:
    """Return a model of Ollama's registry, or of the registry at the start of the name."""
    match = _OLLAMA_NAME_PATTERN.fullmatch(text)
    if match is not None:
        path, tag = f"{match['owner'] or 'library'}/{match['name']}".lower(), match["tag"] or "latest"
        reference = images.parse(f"oci://{OLLAMA_REGISTRY}/{path}:{tag}")
    else:
        reference = images.parse(f"oci://{text}") if "." in text.partition("/")[0] and "/" in text else None
    if reference is None:
        raise _invalid_text(f"is not a model such as llama3.2:3b: {names.to_single_line(text[:100])!r}")
    return ImageRef(reference, is_ollama=True)


def _parse_image(text: str) -> ImageRef:
    reference = images.parse(text)
    if reference is None:
        raise _invalid_text(
            "is not an image such as oci://registry.example/group/model:tag:"
            f" {names.to_single_line(text[:100])!r}"
        )
    return ImageRef(reference, is_ollama=reference.host == OLLAMA_REGISTRY)


def _parse_object(text: str) -> ObjectRef:
    match = _S3_URL_PATTERN.fullmatch(text)
    if match is None or not {"", ".", ".."}.isdisjoint(match["key"].rstrip("/").split("/")):
        raise _invalid_text("is not an object such as s3://bucket/folder/model.gguf")
    return ObjectRef(match["bucket"], match["key"])


def _invalid_text(problem: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"text: {problem}", field="text")
