"""The page: one document with a strict policy, the files of its build, and the addresses that lead there."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from asgiref.testing import ApplicationCommunicator
from django.conf import settings as django_settings
from django.contrib.staticfiles import finders
from django.test import Client

from localai_cluster.asgi import application
from localai_cluster.edge import strip_slash
from localai_cluster.web import page
from localai_cluster.web.page import accepts_gzip

SCRIPT = "import './x.js';\n" * 20
MANIFEST: dict[str, Any] = {
    "src/main.tsx": {
        "file": "assets/main-abc.js",
        "css": ["assets/main-abc.css"],
        "imports": ["_react.js", "_shared.js"],
        "dynamicImports": ["src/late.tsx"],
        "isEntry": True,
    },
    "_react.js": {"file": "assets/react-1.js", "imports": ["_shared.js"]},
    "_shared.js": {"file": "assets/shared-2.js", "css": ["assets/shared-2.css"]},
    "src/late.tsx": {"file": "assets/late-3.js", "css": ["assets/late-3.css"], "imports": ["_react.js"]},
    "src/nodes/list/page.tsx": {
        "file": "assets/nodes-4.js",
        "imports": ["_react.js", "_grid.js"],
        "paths": ["nodes"],
    },
    "src/nodes/detail/page.tsx": {
        "file": "assets/node-5.js",
        "imports": ["src/main.tsx"],
        "paths": ["nodes/*"],
    },
    "_grid.js": {"file": "assets/grid-6.js", "imports": ["_shared.js"]},
}
PAGES = ("/app", "/app/nodes", "/app/nodes/a%2Fb", "/login")


@pytest.fixture
def no_build(settings: Any, tmp_path: Path) -> Iterator[Path]:
    """A folder for a build that is not there yet."""
    dist = tmp_path / "dist"
    settings.UI_DIST = dist
    settings.STATICFILES_DIRS = [django_settings.FILES / "static" / "site", ("ui", dist)]
    kept: Any = finders.get_finder
    kept.cache_clear()
    yield dist
    kept.cache_clear()


@pytest.fixture
def built(no_build: Path) -> Path:
    """A small build as Vite leaves it, one file compressed beside it."""
    (no_build / "assets").mkdir(parents=True)
    write(no_build, MANIFEST)
    (no_build / "assets" / "main-abc.js").write_text(SCRIPT)
    (no_build / "assets" / "main-abc.js.gz").write_bytes(gzip.compress(SCRIPT.encode(), mtime=0))
    (no_build / "assets" / "main-abc.css").write_text("body{}")
    return no_build


def write(dist: Path, manifest: Any) -> None:
    (dist / "manifest.json").write_text(json.dumps(manifest))


def get(path: str, **headers: str) -> Any:
    return Client().get(path, headers=headers)


# The document


@pytest.mark.rule("http-5.2", "http-0.3")
@pytest.mark.parametrize("path", PAGES)
def test_one_document_for_every_path(built: Path, path: str) -> None:
    """§5.2: for everyone, never kept without asking; it brings the CSRF cookie."""
    answer = get(path)
    assert (answer.status_code, answer["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert answer["Cache-Control"] == "no-cache"
    assert answer.cookies["csrftoken"].value
    assert "sessionid" not in answer.cookies
    assert '<div id="root"></div>' in answer.content.decode()
    assert Client().head(path).status_code == 200
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert Client(enforce_csrf_checks=True).generic(method, path).status_code == 405


def test_it_loads_what_the_build_says(built: Path) -> None:
    """The entry, its styles and what it imports at once, each once; what is loaded later is not named."""
    html = get("/app").content.decode()
    assert re.findall(r'<script type="module" src="([^"]+)"></script>', html) == [
        "/static/ui/assets/main-abc.js"
    ]
    assert re.findall(r'rel="stylesheet" href="([^"]+)"', html) == [
        "/static/ui/assets/main-abc.css",
        "/static/ui/assets/shared-2.css",
    ]
    assert re.findall(r'rel="modulepreload" href="([^"]+)"', html) == [
        "/static/ui/assets/react-1.js",
        "/static/ui/assets/shared-2.js",
    ]
    assert re.findall(r'<link rel="preload" href="([^"]+)" as="fetch" crossorigin>', html) == [
        "/api/auth/status"
    ]
    assert f'data-build="{page.build_id()}"' in html
    assert not re.search(r"<script(?! type=\"module\" src=)|<style|style=|onload=", html)


@pytest.mark.parametrize(
    ("path", "files"),
    [
        ("/app/nodes", ["nodes-4", "grid-6"]),
        ("/app/nodes/a%2Fb", ["node-5"]),
        ("/app/nodes/x/logs", ["node-5"]),
        ("/app/chat", []),
        ("/app/none/*", []),
        ("/app/*", []),
        ("/login", []),
    ],
)
def test_a_path_preloads_its_own_code_too(built: Path, path: str, files: list[str]) -> None:
    """Each file once; a page that the build does not have, or that the table does not name, adds nothing."""
    found = re.findall(r'rel="modulepreload" href="/static/ui/assets/([^"]+).js"', get(path).content.decode())
    assert found == ["react-1", "shared-2", *files]


def test_the_policy_lets_in_what_this_host_serves(built: Path) -> None:
    """No inline script, no other host; styles made while it runs carry the nonce of this answer alone."""
    first, second = get("/app"), get("/app")
    nonces = [
        re.findall(r'<meta name="style-nonce" content="([^"]+)">', one.content.decode())
        for one in (first, second)
    ]
    ((nonce,), (other,)) = nonces
    assert nonce != other
    assert len(nonce) >= 20
    assert first["Content-Security-Policy"] == (
        f"default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; img-src 'self' data:; "
        "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )
    assert first["X-Frame-Options"] == "DENY"


def test_a_new_build_is_served_without_a_restart(built: Path) -> None:
    """The manifest is read again when it changes, and the build has another name."""
    before = page.build_id()
    changed = {**MANIFEST, "src/main.tsx": {"file": "assets/main-def-longer.js", "isEntry": True}}
    write(built, changed)
    html = get("/app").content.decode()
    assert "assets/main-def-longer.js" in html
    assert page.build_id() not in ("", before)
    assert "stylesheet" not in html
    write(built, MANIFEST)
    assert page.build_id() == before


def test_the_manifest_is_read_once(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it is the same file."""
    expected = page.build_id()
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail("read again"))
    assert page.build_id() == expected


@pytest.mark.parametrize("path", PAGES)
def test_without_a_build_it_says_what_to_run(no_build: Path, path: str) -> None:
    """503 in plain HTML, for people."""
    answer = get(path)
    assert answer.status_code == 503
    assert "<code>make ui</code>" in answer.content.decode()
    assert answer["Cache-Control"] == "no-cache"
    assert "script-src 'self';" in answer["Content-Security-Policy"]
    assert page.build_id() == ""


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"other.tsx": {}}', '{"src/main.tsx": {"imports": ["_x"]}}']
)
def test_a_manifest_that_cannot_be_read_is_none(
    built: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """503 and a line in the log, never a 500."""
    (built / "manifest.json").write_text(text)
    assert get("/app").status_code == 503
    assert "build again" in caplog.text


# Where it is found


@pytest.mark.rule("http-5.2")
@pytest.mark.parametrize(
    ("path", "where"),
    [
        ("/browse", "/app"),
        ("/browse/nodes/x?a=b", "/app/nodes/x?a=b"),
        ("/favicon.svg", "/static/favicon.svg"),
    ],
)
def test_old_addresses_lead_there(path: str, where: str) -> None:
    """§5.2: 301."""
    answer = get(path)
    assert (answer.status_code, answer["Location"]) == (301, where)


@pytest.mark.rule("http-5.2", "http-0.4")
def test_an_unknown_path_is_the_page_for_a_browser_and_json_for_programs(built: Path) -> None:
    """§0.4: by what the caller accepts; API paths are never HTML. 404 either way (D-PAGE)."""
    for path in ("/nope", "/invite/x", "/explorer"):
        answer = get(path, Accept="text/html,*/*")
        assert (answer.status_code, answer["Content-Type"]) == (404, "text/html; charset=utf-8")
        assert '<div id="root"></div>' in answer.content.decode()
    for path, headers in [
        ("/nope", {}),
        ("/nope", {"Accept": "application/json"}),
        ("/nope", {"Accept": "text/html", "Content-Type": "application/json"}),
        ("/api/nope", {"Accept": "text/html"}),
        ("/static/nope.js", {"Accept": "text/html"}),
        ("/v1/nope", {"Accept": "text/html"}),
    ]:
        answer = get(path, **headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, 404), path


def test_an_unknown_path_without_a_build_is_json(no_build: Path) -> None:
    """Nothing to show."""
    assert get("/nope", Accept="text/html").json()["error"]["message"] == "resource not found"


@pytest.mark.rule("http-0.1")
@pytest.mark.parametrize("path", ["/app/", "/app/nodes/", "/login/", "/browse/", "/version/"])
def test_a_trailing_slash_is_the_same_page(path: str) -> None:
    """§0.1: without a redirect."""
    assert strip_slash({"type": "http", "path": path})["path"] == path[:-1]


# Files, as the web process serves them


def fetch(path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One GET through the whole ASGI application."""

    untyped: Any = ApplicationCommunicator

    async def talk() -> tuple[int, dict[str, str], bytes]:
        sent = [(name.lower().replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": sent}
        browser: Any = untyped(application, scope)
        await browser.send_input({"type": "http.request"})
        start = await browser.receive_output(10)
        body, more = b"", True
        while more:
            part = await browser.receive_output(10)
            body, more = body + part.get("body", b""), part.get("more_body", False)
        await browser.wait(60)
        return start["status"], {k.decode().lower(): v.decode() for k, v in start["headers"]}, body

    return async_to_sync(talk)()


@pytest.mark.rule("http-5.2", "http-0.1")
def test_hashed_files_are_kept_for_ever_and_sent_compressed(built: Path) -> None:
    """§5.2, §0.1: gzip for anyone who accepts it, plain for others; both say that it depends."""
    status, headers, body = fetch("/static/ui/assets/main-abc.js", Accept_Encoding="br, gzip")
    assert (status, gzip.decompress(body).decode()) == (200, SCRIPT)
    assert headers["content-encoding"] == "gzip"
    assert "javascript" in headers["content-type"]
    assert int(headers["content-length"]) == len(body)
    status, plain, body = fetch("/static/ui/assets/main-abc.js")
    assert (status, body.decode()) == (200, SCRIPT)
    assert "content-encoding" not in plain
    for found in (headers, plain):
        assert found["cache-control"] == "public, max-age=31536000, immutable"
        assert found["vary"] == "Accept-Encoding"
    status, css, body = fetch("/static/ui/assets/main-abc.css", Accept_Encoding="gzip")
    assert (status, body, css.get("content-encoding")) == (200, b"body{}", None)


def test_other_files_are_asked_for_again(built: Path) -> None:
    """Their names stay when they change."""
    for path in ("/static/favicon.svg", "/static/admin-pages.css"):
        status, headers, _ = fetch(path, Accept_Encoding="gzip")
        assert status == 200
        assert "cache-control" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/static/src/main.tsx",
        "/static/package.json",
        "/static/node_modules/react/package.json",
        "/static/site/favicon.svg",
        "/static/dist/manifest.json",
        "/static/ui/../package.json",
        "/static/ui/assets/../../../package.json",
        "/static/ui/assets",
        "/static/ui/assets/",
        "/static/ui/assets/a\0b.js",
        "/static/ui/assets/none.js",
        "/static/ui//etc/passwd",
    ],
)
def test_nothing_else_of_the_folder_is_served(built: Path, path: str) -> None:
    """Sources, packages, and what lies beside."""
    assert fetch(path, Accept_Encoding="gzip")[0] == 404


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("gzip", True),
        ("deflate, gzip;q=0.5, br", True),
        ("GZIP", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0, br", False),
        ("br", False),
        ("x-gzip", False),
        ("", False),
        ("gzip;q=evil", False),
    ],
)
def test_who_accepts_gzip(header: str, accepted: bool) -> None:
    """By the header's own rules."""
    assert accepts_gzip(header) is accepted
