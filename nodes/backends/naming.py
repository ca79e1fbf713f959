"""The names in a command, so that every worker means the same backend by them. Pure.

A stock worker looks for the installed backend under the very text of `backend`: empty for an address alone,
or with the gallery before it, it finds nothing after a complete download (contract/nats.md §4.1).
"""

from dataclasses import replace
from typing import TypeVar

from localai_cluster.gallery_index import name_of
from localai_cluster.messaging.codec import DecodeError, decode_galleries, encode_galleries
from localai_cluster.messaging.messages import InstallRequest, UpgradeRequest

R = TypeVar("R", InstallRequest, UpgradeRequest)


def bare(name: str) -> str:
    """`gallery@name` without the gallery."""
    return name.rpartition("@")[2]


def understood(request: R) -> R:
    """The same request with a plain name; for an address `backend` and `name` are what it will be called.

    A gallery named before the backend's name becomes the only one sent. If it is not among those sent, the
    name stays as it is: the backend of another gallery must not be installed in its place.
    """
    if request.uri:
        name = bare(request.name) or bare(request.backend) or name_of(request.uri)
        return replace(request, backend=name, name=name)
    asked = request.backend or request.name
    gallery, _, name = asked.rpartition("@")
    if not gallery:
        return replace(request, backend=name)
    try:
        chosen = [one for one in decode_galleries(request.backend_galleries or "null") if one.name == gallery]
    except DecodeError:
        return request  # an admin wrote them; the worker says what is wrong
    if not chosen:
        return replace(request, backend=asked)
    return replace(request, backend=name, backend_galleries=encode_galleries(chosen))
