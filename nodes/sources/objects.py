"""Files in S3-compatible object stores, through `obstore`, which is imported at the first use.

Credentials come from the settings only. Without credentials requests are not signed, because the library must
not use credentials of the machine that this process runs on. Only the host of the store is dialled.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from localai_cluster.kit import names
from localai_cluster.kit.outbound import SourceBody, SourceError, SourceMissing, SourceRefused
from localai_cluster.kit.settings_table import ClusterSettings
from nodes.sources.variants import RepositoryFile

SCHEME = "s3://"
MAX_OBJECTS = 10_000
"""Maximum objects of a folder that are listed."""
REQUEST_WITHIN = 60.0
"""Seconds until a response must begin: for an object, its size, or a page of a list."""
_PIECE_BYTES = 1024 * 1024
_DEFAULT_REGION = "us-east-1"
_NO_PROXY_URL = "http://no-proxy.invalid"
_NO_RANGE_PATTERN = re.compile("non-2xx status code: 416 |Received non-partial response")
"""Messages of the library if the object has no byte of the range (an empty one has none), or if the store
ignores the range."""
_AMAZON_DOMAINS = "amazonaws.com,amazonaws.com.cn"


async def store(settings: ClusterSettings, bucket: str) -> Any:
    """Return the client of a bucket."""
    return await asyncio.to_thread(_make_store, settings, bucket)


def _make_store(settings: ClusterSettings, bucket: str) -> Any:
    from obstore.store import S3Store

    options: dict[str, Any] = {"region": settings.s3_region or _DEFAULT_REGION}
    if settings.s3_endpoint:
        options |= {"endpoint": settings.s3_endpoint, "virtual_hosted_style_request": False}
    if settings.s3_access_key and settings.s3_secret_key:
        options |= {"access_key_id": settings.s3_access_key, "secret_access_key": settings.s3_secret_key}
    else:
        options["skip_signature"] = True
    client: Any = {
        "allow_http": settings.s3_endpoint.startswith("http://"),
        "timeout": "1h",
        "connect_timeout": "10s",
        # The library would use the proxies of the environment and follow redirects to any host. A proxy that
        # does not exist stands in for both, and only the object store itself is dialled without it.
        "proxy_url": _NO_PROXY_URL,
        "proxy_excludes": urlsplit(settings.s3_endpoint).hostname or _AMAZON_DOMAINS,
    }
    # The operation repeats what failed, with a reason that people see.
    return S3Store(bucket, **options, client_options=client, retry_config={"max_retries": 0})


async def read(store: Any, url: str, key: str, offset: int, length: int | None) -> SourceBody:
    """Return an object from byte `offset` on, `length` bytes or all of it; raise SourceError.

    If the object has no byte of this range, or the store ignores ranges, the body is the whole object.
    """
    import obstore
    from obstore import exceptions

    options: Any = None
    if length is not None:
        options = {"range": (offset, offset + length)}
    elif offset:
        options = {"range": {"offset": offset}}
    with translate_errors(url):
        async with asyncio.timeout(REQUEST_WITHIN):
            try:
                found = await obstore.get_async(store, key, options=options)
            except exceptions.GenericError as error:
                if not _NO_RANGE_PATTERN.search(str(error)):
                    raise
                found, offset, options = await obstore.get_async(store, key), 0, None
    total, validator = int(found.meta["size"]), str(found.meta.get("e_tag") or "")
    # The library has refused a response with another range than the requested one.
    return SourceBody(_pieces(found, url), offset, total, validator, has_ranges=options is not None)


async def _pieces(found: Any, url: str) -> AsyncIterator[bytes]:
    stream = aiter(found.stream(min_chunk_size=_PIECE_BYTES))
    while True:
        # Not around the yield: errors of the reader are not those of the source.
        with translate_errors(url):
            piece = await anext(stream, None)
        if piece is None:
            return
        yield bytes(piece)


async def list_files(store: Any, key: str) -> list[RepositoryFile]:
    """Return the object with this key, or else the objects below it; raise FileNotFoundError without any."""
    import obstore

    if not key.endswith("/"):
        try:
            async with asyncio.timeout(REQUEST_WITHIN):
                meta = await obstore.head_async(store, key)
        except FileNotFoundError:
            key = f"{key}/"
        else:
            return [RepositoryFile(key, int(meta["size"]))]
    found: list[RepositoryFile] = []
    pages = aiter(obstore.list(store, prefix=key, chunk_size=1000))
    while True:
        async with asyncio.timeout(REQUEST_WITHIN):
            batch = await anext(pages, None)
        if batch is None:
            break
        listed = [RepositoryFile(str(meta["path"]), int(meta["size"])) for meta in batch]
        found += [file for file in listed if not names.find_unprintable(file.path)]
        if len(found) > MAX_OBJECTS:
            raise SourceError(
                f"{names.to_single_line(key[:100])} has more than {MAX_OBJECTS} objects:"
                " name a folder below it"
            )
    if not found:
        raise FileNotFoundError
    return found


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Translate the library's exceptions into SourceError."""
    from obstore import exceptions

    shown = names.to_single_line(url[:200])
    try:
        yield
    except FileNotFoundError:
        raise SourceMissing(f"{shown} does not exist") from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError):
        hint = "set CLUSTER_S3_ACCESS_KEY and CLUSTER_S3_SECRET_KEY to a key that may read it"
        raise SourceRefused(f"{shown}: access refused: {hint}") from None
    except TimeoutError:
        raise SourceError(f"{shown}: no answer within {REQUEST_WITHIN:.0f} s", can_retry=True) from None
    except exceptions.BaseError as error:
        reason = names.to_single_line(" ".join(str(error).split())[:200])
        raise SourceError(f"{shown}: {reason}", can_retry=True) from error
