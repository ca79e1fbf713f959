"""The key and URL of a model's file on a worker, and the model's folder there by the path of one file. Pure.

A key is `models/<model>/<path in the models folder>` (R2.58, worker.md §14). The worker answers with the path
of the file on its own disk; without its relative part, that is the folder against which relative options
resolve there.
"""

from pathlib import PurePosixPath
from urllib.parse import quote

from localai_cluster.kit import names

_ROUTE = "/v1/files/"


class NoKey(ValueError):
    """A path that cannot have a key on a worker; the text gives the reason."""


def key_of(model: str, relative: str) -> str:
    """Return the key of the file at this path in the models folder; NoKey if it leads out of that folder.

    A name that cannot be written into a header or a gRPC message has no key either.
    """
    parts = (*model.split("/"), *relative.split("/"))
    if not {"", ".", ".."}.isdisjoint(parts):
        raise NoKey("leads out of its folder")
    if "\\" in model or "\\" in relative:
        raise NoKey("has a backslash in its name")
    for text in (model, relative):
        if character := names.unprintable(text):
            raise NoKey(f"has the character {character} in its name")
    return "/".join(("models", *parts))


def path_of(key: str) -> str:
    """Return the URL path of this key, with every reserved character encoded."""
    return _ROUTE + "/".join(quote(part, safe="") for part in key.split("/"))


def root_of(local_path: str, relative: str) -> str:
    """Return the model's folder on the worker by its path of one file; NoKey if they do not match."""
    root = local_path.removesuffix("/" + relative)
    if root == local_path or not PurePosixPath(root).is_absolute() or names.unprintable(root):
        raise NoKey(f"is kept by its worker at {names.plain(local_path[:200])!r}, which is no place for it")
    return root
