"""References of images, such as `oci://registry.example:5000/group/image:tag` (worker.md §18.6)."""

import re
from dataclasses import dataclass

IMAGE_SCHEMES = ("oci://", "docker://")
DOCKER_HUB = "docker.io"
_KNOWN_HOSTS = (DOCKER_HUB, "quay.io", "ghcr.io")
"""Registry hosts: an address that begins with one is an image, even without a scheme and a tag."""
_DOCKER_HUB_HOSTS = (DOCKER_HUB, "index.docker.io", "registry-1.docker.io")
_MAX_REFERENCE_LENGTH = 512
_PATH_COMPONENT_PATTERN = r"[a-z0-9]+(?:(?:\.|_{1,2}|-{1,8})[a-z0-9]+)*"
_REFERENCE_PATTERN = re.compile(
    r"(?:(?P<host>localhost|[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+|[A-Za-z0-9.-]+(?=:\d)|\[[0-9A-Fa-f:.]+\])"
    r"(?P<port>:\d{1,5})?/)?"
    rf"(?P<path>{_PATH_COMPONENT_PATTERN}(?:/{_PATH_COMPONENT_PATTERN})*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class ImageReference:
    """An image in a registry: host with port, path, and a tag or digest."""

    host: str
    path: str
    version: str

    @property
    def is_pinned(self) -> bool:
        """True if a digest names the image."""
        return self.version.startswith("sha256:")

    def __str__(self) -> str:
        return f"{self.host}/{self.path}{'@' if self.is_pinned else ':'}{self.version}"


def fallback_images(uri: str) -> tuple[str, ...]:
    """Return the images to try if an image's `latest-…` tag is missing (worker.md §18.3)."""
    head, _, tag = uri.rpartition(":")
    if parse(uri) is None or "/" in tag or "@" in tag or "latest-" not in tag:
        return ()
    image = f"{head}:{tag.replace('latest-', 'master-', 1)}"
    return (image, f"{image}-development")


def parse(uri: str) -> ImageReference | None:
    """Return the image that `uri` names; None if `uri` does not name an image.

    Without a scheme, a tag or digest is required, except on the hosts of `_KNOWN_HOSTS`, because the address
    could be that of a file. An image without a host is on Docker Hub.
    """
    scheme = next((scheme for scheme in IMAGE_SCHEMES if uri.startswith(scheme)), "")
    if (
        len(uri) > _MAX_REFERENCE_LENGTH
        or (match := _REFERENCE_PATTERN.fullmatch(uri.removeprefix(scheme))) is None
    ):
        return None
    host, path = (match["host"] or DOCKER_HUB) + (match["port"] or ""), match["path"]
    has_version = match["digest"] or match["tag"]
    if not (scheme or (has_version and "/" in uri) or match["host"] in _KNOWN_HOSTS):
        return None
    if host in _DOCKER_HUB_HOSTS:
        host, path = DOCKER_HUB, path if "/" in path else f"library/{path}"
    return ImageReference(host.lower(), path, match["digest"] or match["tag"] or "latest")
