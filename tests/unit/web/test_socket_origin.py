"""Which pages may open a socket: those of this host, and those that the operator has named."""

from typing import Any

import pytest

from localai_cluster.web.sockets import same_origin

HERE = "cluster:8080"


def opened_by(origin: str | None, host: str = HERE) -> bool:
    """Whether a page of `origin` may."""
    sent = [] if origin is None else [(b"origin", origin.encode("latin-1"))]
    return same_origin({"headers": [*sent, (b"host", host.encode())]})


@pytest.mark.parametrize(
    "origin", [None, "http://cluster:8080", "https://cluster:8080", "HTTP://CLUSTER:8080"]
)
def test_programs_and_pages_of_this_host(origin: str | None) -> None:
    """TLS ends in front of this process, so the scheme says nothing; programs send no Origin."""
    assert opened_by(origin)


def test_an_address_in_brackets() -> None:
    """IPv6."""
    assert opened_by("http://[::1]:8080", "[::1]:8080")
    assert not opened_by("http://[::1", "[::1")


@pytest.mark.parametrize(
    "origin",
    [
        "",
        "null",
        "http://",
        "http://cluster",
        "http://cluster:8081",
        "http://evil.example",
        "http://cluster:8080@evil.example",
        "http://evil@cluster:8080",
        "http://cluster:8080.evil.example",
        "http://cluster:8080\\@evil.example",
        "http://\xefcluster:8080",
    ],
)
def test_pages_of_others(origin: str) -> None:
    """Another port is another origin; what stands before an @ is no host."""
    assert not opened_by(origin)


def test_pages_behind_a_proxy_that_names_another_host(settings: Any) -> None:
    """Who may change things there may watch them too: the same setting, as Django reads it."""
    assert not opened_by("https://cluster.example", "10.0.0.1:8080")
    settings.CSRF_TRUSTED_ORIGINS = ["https://cluster.example", "https://*.lab.example"]
    assert opened_by("https://cluster.example", "10.0.0.1:8080")
    assert opened_by("https://one.lab.example", "10.0.0.1:8080")
    for other in (
        "http://cluster.example",
        "https://evil.cluster.example",
        "https://evillab.example",
        "null",
    ):
        assert not opened_by(other, "10.0.0.1:8080")
