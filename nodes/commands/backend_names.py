"""The names in a command, made such that every worker resolves them to the same backend. Pure.

A stock worker looks up the installed backend by the exact text of `backend`: if it is empty, as for an
address alone, or starts with the gallery, the lookup fails after a complete download (contract/nats.md §4.1).
"""

from dataclasses import replace
from typing import TypeVar

from localai_cluster.gallery_index import name_of
from localai_cluster.messaging.codec import DecodeError, decode_galleries, encode_galleries
from localai_cluster.messaging.messages import InstallRequest, UpgradeRequest

R = TypeVar("R", InstallRequest, UpgradeRequest)


def bare(name: str) -> str:
    """Return `gallery@name` without the gallery."""
    return name.rpartition("@")[2]


def understood(request: R) -> R:
    """Return the request with a plain name; for an address, `backend` and `name` are its future name.

    A gallery before the backend's name becomes the only gallery of the request. If the request does not
    contain that gallery, the name stays as it is: the backend of another gallery must not be installed in its
    place.
    """
    if request.uri:
        name = bare(request.name) or bare(request.backend) or name_of(request.uri)
        return replace(request, backend=name, name=name)
    full_name = request.backend or request.name
    gallery, _, name = full_name.rpartition("@")
    if not gallery:
        return replace(request, backend=name)
    try:
        listed = decode_galleries(request.backend_galleries or "null")
    except DecodeError:
        return request  # an admin wrote them; the worker reports the mistake
    chosen = [entry for entry in listed if entry.name == gallery]
    if not chosen:
        return replace(request, backend=full_name)
    return replace(request, backend=name, backend_galleries=encode_galleries(chosen))
