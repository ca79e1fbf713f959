"""Pushes a backend's folder to a registry as an image that LocalAI's workers and ours install.

    python examples/gallery/image.py FOLDER http://127.0.0.1:5000/backends/mine:latest

The image has no base: `run.sh`, `metadata.json` and the libraries lie at its top. The libraries in `lib/`
fill layers of their own. It needs no container runtime and nothing but Python (`--pack zstd`: and the package
`zstandard`); with `--pack none` the layers are plain. It prints the digest of the image.
"""

import argparse
import gzip
import hashlib
import json
import platform
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urljoin, urlsplit

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("image", help="http(s)://HOST/PATH:TAG")
    parser.add_argument("--layers", type=int, default=1, help="layers for the files of lib/")
    parser.add_argument("--pack", choices=["gzip", "zstd", "none"], default="gzip")
    options = parser.parse_args()
    if not (options.folder / "run.sh").is_file():
        sys.exit(f"{options.folder} has no run.sh at its top")
    parts = urlsplit(options.image)
    name, _, tag = parts.path.strip("/").rpartition(":")
    registry = Registry(f"{parts.scheme}://{parts.netloc}/v2/{name}/")
    with tempfile.TemporaryDirectory(dir=options.folder.parent) as work:
        layers = [registry.push_layer(group, options, Path(work)) for group in groups(options)]
    print(registry.push_image(layers, tag))


def groups(options: argparse.Namespace) -> list[list[Path]]:
    """Return the paths of each layer: the libraries first, then everything else."""
    everything = sorted(path for path in options.folder.rglob("*") if not path.is_dir() or path.is_symlink())
    libraries = [path for path in everything if path.relative_to(options.folder).parts[0] == "lib"]
    rest = [path for path in everything if path not in set(libraries)]
    return [
        group for group in (*(libraries[n :: options.layers] for n in range(options.layers)), rest) if group
    ]


class Registry:
    """Pushes to one repository; `base` is its URL."""

    def __init__(self, base: str) -> None:
        self.base = base

    def push_layer(self, paths: list[Path], options: argparse.Namespace, work: Path) -> dict[str, object]:
        plain = work / "layer"
        with tarfile.open(plain, "w:") as tar:
            for path in paths:
                tar.add(path, str(path.relative_to(options.folder)), recursive=False)
        diff, media_type, packed = _digest(plain), LAYER, plain
        if options.pack != "none":
            packed, media_type = work / "packed", f"{LAYER}+{options.pack}"
            with open(plain, "rb") as source, open(packed, "wb") as target:
                _pack(source, target, options.pack)
        digest, size = _digest(packed), packed.stat().st_size
        with open(packed, "rb") as body:
            self._push(digest, size, body)
        return {"mediaType": media_type, "digest": digest, "size": size, "diff": diff}

    def push_image(self, layers: list[dict[str, object]], tag: str) -> str:
        """Push a list with the manifest of this platform; return the digest of that manifest."""
        rootfs = {"type": "layers", "diff_ids": [layer.pop("diff") for layer in layers]}
        config = json.dumps({"os": "linux", "architecture": ARCHITECTURE, "rootfs": rootfs}).encode()
        described = {"mediaType": CONFIG, "digest": _digest_of(config), "size": len(config)}
        self._push(described["digest"], len(config), config)
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described, "layers": layers}
        body = json.dumps(manifest).encode()
        self._put(f"manifests/{_digest_of(body)}", body, MANIFEST)
        build = {"mediaType": MANIFEST, "digest": _digest_of(body), "size": len(body)}
        build["platform"] = {"os": "linux", "architecture": ARCHITECTURE}
        listed = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [build]}).encode()
        self._put(f"manifests/{tag or 'latest'}", listed, INDEX)
        return str(build["digest"])

    def _push(self, digest: object, size: int, body: object) -> None:
        started = urllib.request.Request(f"{self.base}blobs/uploads/", method="POST", data=b"")
        with urllib.request.urlopen(started) as answer:
            location = urljoin(self.base, answer.headers["Location"])
        target = f"{location}{'&' if '?' in location else '?'}digest={digest}"
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        urllib.request.urlopen(urllib.request.Request(target, body, headers, method="PUT")).close()  # type: ignore[arg-type]

    def _put(self, path: str, body: bytes, media_type: str) -> None:
        headers = {"Content-Type": media_type}
        urllib.request.urlopen(urllib.request.Request(self.base + path, body, headers, method="PUT")).close()


def _pack(source: BinaryIO, target: BinaryIO, kind: str) -> None:
    if kind == "gzip":
        with gzip.GzipFile(fileobj=target, mode="wb", compresslevel=6, mtime=0) as packed:
            shutil.copyfileobj(source, packed)
        return
    import zstandard

    zstandard.ZstdCompressor().copy_stream(source, target)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


def _digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


if __name__ == "__main__":
    main()
