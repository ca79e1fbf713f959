"""A fake hub, Ollama registry, object store and gallery, on top of `sources.Source`.

The shapes of the answers are in `tests/data/sources`. Files are redirected to signed addresses, as by the
real sources.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.sources import LFS_POINTER, Source, sha256_of, started

HUB = "/hub"
"""Path prefix of the hub, so that other addresses of the server do not belong to the hub."""
COMMIT = "91cad51170dc346986eccefdc2dd33a9da36ead9"
SHAPES = Path(__file__).parent.parent / "data" / "sources"
_TEXT, _LIST, _U32 = 8, 9, 4
FIGURES = {
    "block_count": 24,
    "embedding_length": 896,
    "feed_forward_length": 4864,
    "attention.head_count": 14,
    "attention.head_count_kv": 2,
    "context_length": 32768,
}


def shape(name: str) -> dict[str, Any]:
    """Return an answer of the real source."""
    found: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())
    return found


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(
    size: int = 4096,
    *,
    vocabulary: int = 3,
    architecture: str = "qwen2",
    late: bool = False,
    template: str = "",
) -> bytes:
    """Return a GGUF file of this size; `late`: its figures come after the vocabulary, like its template."""
    figures = [
        _text(f"{architecture}.{key}") + struct.pack("<II", _U32, value) for key, value in FIGURES.items()
    ]
    words = b"".join(_text(f"word{number:06}") for number in range(vocabulary))
    tokens = _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", _LIST, _TEXT, vocabulary) + words
    name = _text("general.architecture") + struct.pack("<I", _TEXT) + _text(architecture)
    pairs = [name, tokens, *figures] if late else [name, *figures, tokens]
    if template:
        pairs.append(_text("tokenizer.chat_template") + struct.pack("<I", _TEXT) + _text(template))
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs)
    return head + bytes(max(size - len(head), 0))


def add_repository(
    source: Source,
    repo: str,
    files: Mapping[str, bytes],
    *,
    token: str = "",
    revision: str = "main",
    pointer: str = "",
    **facts: Any,
) -> None:
    """Add a repository; a token makes it gated; the file `pointer` is sent as its LFS pointer."""
    siblings = [{"rfilename": ".gitattributes", "size": 1519, "blobId": "a" * 40}]
    for path, content in files.items():
        sibling: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": "b" * 40}
        if path.endswith((".gguf", ".safetensors", ".bin")):
            sibling["lfs"] = {"sha256": sha256_of(content), "size": len(content), "pointerSize": 134}
        siblings.append(sibling)
        sent = LFS_POINTER % (sha256_of(content).encode(), len(content)) if path == pointer else content
        source.files[f"{HUB}/{repo}/resolve/{COMMIT}/{path}"] = sent
    body = shape("hub-model") | {"id": repo, "sha": COMMIT, "siblings": siblings}
    body |= {"gated": "manual" if token else False, **facts}
    for name in {revision, COMMIT}:
        source.files[f"{HUB}/api/models/{repo}/revision/{name}"] = json.dumps(body).encode()
    if token:
        source.tokens[f"{HUB}/{repo}/resolve/"] = f"Bearer {token}"


def add_image(
    source: Source,
    path: str,
    tag: str,
    layers: Mapping[str, bytes],
    *,
    annotations: Mapping[str, str] | None = None,
) -> None:
    """Add a manifest with these layers, by media type, and their blobs."""
    entries = []
    for media_type, content in layers.items():
        digest = f"sha256:{sha256_of(content)}"
        entry: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": len(content)}
        if annotations and media_type in annotations:
            entry["annotations"] = {"org.opencontainers.image.title": annotations[media_type]}
        entries.append(entry)
        source.files[f"/v2/{path}/blobs/{digest}"] = content
    manifest = json.dumps(shape("ollama-manifest") | {"layers": entries}).encode()
    for name in (tag, f"sha256:{hashlib.sha256(manifest).hexdigest()}"):
        source.files[f"/v2/{path}/manifests/{name}"] = manifest


def add_objects(source: Source, bucket: str, objects: Mapping[str, bytes]) -> None:
    """Add objects, and their listing."""
    rows = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-01T10:00:00.000Z</LastModified>"
        f"<ETag>&quot;{sha256_of(content)[:32]}&quot;</ETag><Size>{len(content)}</Size></Contents>"
        for key, content in objects.items()
    )
    source.files[f"/{bucket}"] = (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult'
        f' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name><Prefix></Prefix>'
        f"<KeyCount>{len(objects)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
        f"{rows}</ListBucketResult>"
    ).encode()
    for key, content in objects.items():
        source.files[f"/{bucket}/{key}"] = content


@contextmanager
def playing(**options: Any) -> Iterator[Source]:
    """Run a source whose signed addresses may be used more than once."""
    with started(**{"lifetime": 0, **options}) as source:
        yield source
