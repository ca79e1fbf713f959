"""The requests that `make run` prints to paste: of `examples/demo.json`, those whose model the cluster has.

A models folder of an earlier version, or of your own, need not have all of them.
"""

import json
import shlex
from collections.abc import Container
from dataclasses import dataclass

import httpx

from localai_cluster.embedded.layout import EXAMPLES, Layout

_WHAT = {"chat": "an answer that streams", "request": "three vectors"}


@dataclass(frozen=True)
class Request:
    """A line for a shell, and what it brings."""

    what: str
    line: str


def models(layout: Layout) -> frozenset[str]:
    """What the running cluster has; empty if it does not answer."""
    headers = {"Authorization": f"Bearer {layout.secrets.value('admin_api_key')}"}
    try:
        found = httpx.get(
            f"{layout.probe_url}/v1/models",
            headers=headers, timeout=10, trust_env=False, verify=layout.probe_trust,
        ).json()  # fmt: skip
        return frozenset(one["id"] for one in found["data"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError):
        return frozenset()


def of(layout: Layout, there: Container[str]) -> list[Request]:
    """A chat, then embeddings. Both read the key from its file and work from any folder."""
    demo = json.loads((EXAMPLES / "demo.json").read_text(encoding="utf-8"))
    return [
        Request(what, _line(layout, demo[name]["path"], demo[name]["body"]))
        for name, what in _WHAT.items()
        if demo[name]["body"]["model"] in there
    ]


def _line(layout: Layout, path: str, body: object) -> str:
    kept = layout.secrets.path("admin_api_key")
    key = f"$(cat {shlex.quote(str(kept))})" if kept else "$LOCALAI_API_KEY"
    return (
        f'curl -sN {layout.base_url}{path} -H "Authorization: Bearer {key}"'
        f" -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body, separators=(',', ':')))}"
    )
