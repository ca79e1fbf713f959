"""Where a file of a model lies on a worker: its key, its URL, and what its path there says of the rest. Pure.

A key is `models/<model>/<path in the models folder>` (R2.58, worker.md §14). The worker answers with the path
of the file on its own disk; without the relative part that is the folder against which relative options
resolve there.
"""

from pathlib import PurePosixPath
from urllib.parse import quote

from localai_cluster import names

_ROUTE = "/v1/files/"


class NoKey(ValueError):
    """A path that cannot have a key on a worker; the text says why."""


def key_of(model: str, relative: str) -> str:
    """The key of the file at this path in the models folder; NoKey for one that would lead out of it.

    A name that cannot be written into a header or a message of gRPC has no key either.
    """
    parts = (*model.split("/"), *relative.split("/"))
    if not {"", ".", ".."}.isdisjoint(parts):
        raise NoKey("leads out of its folder")
    if "\\" in model or "\\" in relative:
        raise NoKey("has a backslash in its name")
    for text in (model, relative):
        if found := names.unprintable(text):
            raise NoKey(f"has the character {found} in its name")
    return "/".join(("models", *parts))


def path_of(key: str) -> str:
    """The path of the request for this key: every character that could mean something else is encoded."""
    return _ROUTE + "/".join(quote(part, safe="") for part in key.split("/"))


def root_of(local_path: str, relative: str) -> str:
    """The worker's folder of the model, by its path of one file there; NoKey if that does not end so."""
    root = local_path.removesuffix("/" + relative)
    if root == local_path or not PurePosixPath(root).is_absolute() or names.unprintable(root):
        raise NoKey(f"is kept by its worker at {names.plain(local_path[:200])!r}, which is no place for it")
    return root
