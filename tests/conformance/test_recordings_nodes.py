"""What was sent to the reference, sent to ours in the same order; the answers must have the recorded shape.

One story out of all recordings of `contract/http-api.md` §1 and §2.1 to §2.9: recorded ids become ours as
nodes register, tokens are replaced, workers are stock ones that know the shared token only. Compared are
status, content type, field names, presence, JSON types and every value that the story determines. A
difference must be one that `docs/deviations.md` lists, under the id that stands beside it here; one that is
gone must go from here as well.
"""

import asyncio
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from django.utils.dateparse import parse_datetime
from pytest_django import Settings

from localai_cluster import edge
from localai_cluster.asgi import application
from localai_cluster.kit import database_pool
from nodes.api.heartbeats import HeartbeatApplication
from nodes.models import NodeModel
from nodes.registry import heartbeats
from tests.checks import trace
from tests.support import api, hot
from tests.support.environment import API_KEY, REGISTRATION_TOKEN

DEVIATIONS = Path(__file__).resolve().parents[2] / "docs" / "deviations.md"

FILES = (
    "register",
    "heartbeat",
    "labels-and-caps",
    "nodes-list",
    "node-self-service",
    "node-actions",
    "models-on-node",
)
"""In this order where the clock of the recordings (tenths of a second) does not tell."""
EARLY = (
    ("node-self-service", "drain"),
    ("nodes-list", "one draining node"),
    ("heartbeat", "draining node, figures stored"),
    ("nodes-list", "the same after a heartbeat with 7 GB free: capped by the 4 GB budget"),
)
"""These come first in their tenth of a second, in this order: the answers show it."""
OTHERS_PART = re.compile(r"/models/(unload|delete)\Z")
"""Routes of §2.11, recorded in the same files."""

NEVER_GIVEN = re.compile(r"(\w) repeated (\d+) times\Z")
TOKENS = {"Bearer tok": f"Bearer {REGISTRATION_TOKEN}", "Bearer adminkey": f"Bearer {API_KEY}"}
NOT_COMPARED = frozenset({"message", "available_ram", "available_disk"})
"""Wording is ours; of the heartbeats that carried these figures the recordings keep only two."""
ADDED = frozenset(
    {"weak_identity", "approval", "drain", "identity", "revision", "overrides", "label_sources", "inventory"}
    | {"worker_version", "version_skew", "joined", "gpus", "system", "model_bytes"}
    | {"field", "fingerprint", "nats_jwt", "nats_user_seed", "nats_url"}
)
"""Keys that only ours has (D-MORE-FIELDS)."""

NODE_OF_ITS_OWN = "8023a89b-b740-4f51-aeef-f3318f4845f1"
FIRST_WORKER = "ef9b4900-b105-4cad-8a02-3033fa0df092"
SECOND_WORKER = "cd1f728c-7e92-408d-94ad-ae5834ecc3fc"

DIFFERENCES: dict[tuple[str, str], tuple[str, set[str]]] = {
    ("register", "re-registration after a kill: same id, zero created_at, status healthy"): (
        "D-CREATED-AT",
        {"body.created_at: time instead of zero time"},
    ),
    ("heartbeat", "malformed JSON is accepted"): ("D-BEAT-MALFORMED", {"status 400 instead of 200"}),
    ("node-self-service", "models of an unknown id: 200 and []"): (
        "D-UNKNOWN-404",
        {"status 404 instead of 200"},
    ),
    ("node-self-service", "resume lifts a pending node to healthy (approval bypass)"): (
        "D-RESUME-PENDING",
        {"status 409 instead of 200"},
    ),
    ("node-actions", "approve an unknown id"): ("D-UNKNOWN-404", {"status 404 instead of 400"}),
    ("node-actions", "drain an unknown id"): ("D-UNKNOWN-404", {"status 404 instead of 500"}),
    ("node-actions", "delete an unknown id"): ("D-UNKNOWN-404", {"status 404 instead of 500"}),
    ("labels-and-caps", "GET for an unknown node"): ("D-UNKNOWN-404", {"status 404 instead of 200"}),
    ("labels-and-caps", "PUT labels replaces everything and stores a stray id"): (
        "D-LABEL-ID",
        {"body.id is missing"},
    ),
    ("labels-and-caps", "PATCH labels merges, stray id again"): ("D-LABEL-ID", {"body.id is missing"}),
    ("labels-and-caps", "GET labels afterwards: all automatic labels are gone"): (
        "D-LABEL-ID",
        {"body.id is missing"},
    ),
    ("nodes-list", "after cap and budget were set and reset"): (
        "D-LABEL-ID",
        {"body.labels.id is missing"},
    ),
    ("labels-and-caps", "budget under the wrong field name: stored as explicit no-cap"): (
        "D-BUDGET-FIELD",
        {"status 400 instead of 200"},
    ),
    ("labels-and-caps", "budget missing"): ("D-BUDGET-FIELD", {"status 400 instead of 200"}),
}


@dataclass(frozen=True)
class Exchange:
    """One recorded request and its answer."""

    file: str
    recorded: dict[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """What names it in the tables above."""
        return self.file, self.recorded["name"]

    @property
    def when(self) -> tuple[float, int]:
        """Its place in the story, as far as the recordings tell; the order in a file is kept."""
        first = EARLY.index(self.key) if self.key in EARLY else len(EARLY) + FILES.index(self.file)
        return self.recorded["at"], first


def exchanges() -> list[Exchange]:
    """The whole story."""
    found = [Exchange(name, recorded) for name in FILES for recorded in api.examples(name)]
    return sorted(
        (entry for entry in found if not OTHERS_PART.search(entry.recorded["path"])),
        key=lambda entry: entry.when,
    )


def kind(value: Any) -> str:
    """The JSON type, and for texts what they stand for."""
    if not isinstance(value, str):
        return {bool: "bool", int: "whole number", type(None): "null"}.get(type(value), type(value).__name__)
    if value == "0001-01-01T00:00:00Z":
        return "zero time"
    if re.match(r"\d{4}-\d\d-\d\dT.+(Z|[+-]\d\d:\d\d)\Z", value) and parse_datetime(value):
        return "time"
    if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
        return "id"
    return "API token" if re.fullmatch(r"lai-[0-9a-f]{64}", value) else "text"


@dataclass
class Story:
    """The client's side: recorded ids and ours, and what has differed so far."""

    client: httpx.AsyncClient
    ids: dict[str, str] = field(default_factory=dict)

    def ours(self, value: Any) -> Any:
        """A recorded request's value as we send it: our ids and tokens, long texts written out."""
        if isinstance(value, dict):
            return {name: self.ours(inner) for name, inner in value.items()}
        if not isinstance(value, str):
            return value
        if long := NEVER_GIVEN.match(value):
            return long[1] * int(long[2])
        for theirs, own in self.ids.items():
            value = value.replace(theirs, own)
        return REGISTRATION_TOKEN if value == "tok" else TOKENS.get(value, value)

    async def send(self, recorded: dict[str, Any]) -> httpx.Response:
        """The recorded request, as the reference got it."""
        body = self.ours(recorded["request_body"])
        raw = body.encode() if isinstance(body, str) else b"" if body is None else json.dumps(body).encode()
        headers = self.ours(recorded["request_headers"])
        return await self.client.request(
            recorded["method"], self.ours(recorded["path"]), headers=headers, content=raw
        )

    async def call(self, path: str, token: str = "Bearer adminkey") -> None:
        """A request between the recorded ones."""
        answer = await self.client.post(self.ours(path), headers={"Authorization": TOKENS[token]})
        assert answer.status_code == 200, (path, answer.text)

    async def before(self, key: tuple[str, str], recorded: dict[str, Any]) -> None:
        """What happened on the reference between the recorded exchanges."""
        match key[1]:
            case "one healthy worker with one loaded model":
                await hot.in_thread(self.load)
            case "drain" if key[0] == "node-self-service":
                # There the refused resume had approved it.
                await self.call(f"/api/nodes/{NODE_OF_ITS_OWN}/approve")
            case "re-registration after a kill: same id, zero created_at, status healthy":
                await self.call(f"/api/nodes/{SECOND_WORKER}/approve")
                await self.call(f"/api/node/{SECOND_WORKER}/deregister", "Bearer tok")

    def load(self) -> None:
        """The replica that the recordings show."""
        row = next(e for e in api.examples("models-on-node") if e["name"] == "one loaded replica")["body"][0]
        texts = ("model_name", "address", "backend_type", "config_revision")
        assert row["state"] == "loaded"
        made = NodeModel.objects.create(
            node_id=UUID(self.ids[FIRST_WORKER]),
            replica_index=0,
            phase="serving",
            effective_options_hash=row["effective_options_hash"],
            **{name: row[name] for name in texts},
        )
        self.ids[row["id"]] = str(made.id)

    def differences(self, recorded: dict[str, Any], answer: httpx.Response) -> Iterator[str]:
        """In what the answer is not the recorded one."""
        body: Any = answer.json() if answer.content else None
        if answer.headers.get("content-type") != recorded.get("content_type"):
            yield f"content type {answer.headers.get('content-type')}"
        if answer.status_code == recorded["status"]:
            if recorded["method"] == "POST" and answer.status_code == 201:
                self.ids[recorded["body"]["id"]] = body["id"]
            yield from self.compared(recorded["body"], body, "body")
        else:
            yield f"status {answer.status_code} instead of {recorded['status']}"
            envelope = {"code": answer.status_code, "message": "", "type": "node_error"}
            yield from self.compared({"error": envelope}, body, "body")

    def compared(self, theirs: Any, own: Any, where: str) -> Iterator[str]:
        """The differences of two JSON values."""
        name = where.rpartition(".")[2]
        if kind(theirs) != kind(own):
            yield f"{where}: {kind(own)} instead of {kind(theirs)}"
        elif isinstance(theirs, dict):
            yield from (f"{where}.{key} is missing" for key in theirs.keys() - own.keys())
            yield from (f"{where}.{key} is more than recorded" for key in own.keys() - theirs.keys() - ADDED)
            for key in theirs.keys() & own.keys():
                yield from self.compared(theirs[key], own[key], f"{where}.{key}")
        elif isinstance(theirs, list):
            if len(theirs) != len(own):
                yield f"{where}: {len(own)} entries instead of {len(theirs)}"
            for number, pair in enumerate(zip(theirs, own, strict=False)):
                yield from self.compared(*pair, f"{where}[{number}]")
        elif not self.same(theirs, own) and name not in NOT_COMPARED and where != "body.error":
            yield f"{where}: {own!r} instead of {theirs!r}"

    def same(self, theirs: Any, own: Any) -> bool:
        """Whether two values of one kind mean the same; times and tokens are never the same twice."""
        return kind(own) in ("time", "API token") or self.ours(theirs) == own


@asynccontextmanager
async def web_process() -> AsyncIterator[None]:
    """What heartbeats need of a web process."""
    await database_pool.open_shared()
    try:
        yield
    finally:
        await database_pool.close_shared()


async def beats_written() -> None:
    """Waits for the batch of the last heartbeat: the reference answers a beat after it has written it."""
    applications = [route.app for route in edge.ROUTES]
    (heartbeats,) = (app for app in applications if isinstance(app, HeartbeatApplication))
    await heartbeats._writer._batches.idle()


async def replay() -> list[str]:
    """Plays the story; answers one line for every difference that is not expected, or expected and gone."""
    transport = httpx.ASGITransport(app=application, client=("127.0.0.44", 1234))
    unexpected = []
    async with web_process(), httpx.AsyncClient(transport=transport, base_url="http://ours") as client:
        story = Story(client)
        for entry in exchanges():
            await story.before(entry.key, entry.recorded)
            heartbeats.identity_cache().forget("")  # a web process listens; here nothing does
            answer = await story.send(entry.recorded)
            await beats_written()
            found = set(story.differences(entry.recorded, answer))
            name, expected = DIFFERENCES.get(entry.key, ("no deviation", set()))
            unexpected += [f"{entry.key}: {what}" for what in sorted(found - expected)]
            unexpected += [f"{entry.key}: {name} no longer: {what}" for what in sorted(expected - found)]
    return unexpected


@pytest.mark.django_db(transaction=True)
@pytest.mark.rule("W33", "http-1.1", "http-1.2", "http-1.3", "http-1.6", "http-2.1", "http-2.3")
@pytest.mark.rule("http-2.4", "http-2.5", "http-2.6", "http-2.7", "http-2.8", "http-2.9")
def test_every_recorded_exchange_has_the_recorded_shape(settings: Settings) -> None:
    """Acceptance: every shape matches, or is listed as a deviation."""
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER, allow_shared_token_nodes=True, database_url=hot.database_url()
    )
    unexpected = asyncio.run(replay())
    assert not unexpected, "\n".join(unexpected)


def test_the_story_is_whole() -> None:
    """Nothing that was recorded is left out, and every table above speaks of something recorded."""
    keys = {entry.key for entry in exchanges()}
    assert len(keys) == len(exchanges()) == 71
    assert set(DIFFERENCES) | set(EARLY) <= keys


def test_every_recorded_refusal_is_part_of_the_story() -> None:
    """`errors.json` lists refusals without their requests; each is the answer to one that is replayed."""
    played = {
        _refusal(
            entry.recorded["method"],
            re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "<id>", entry.recorded["path"]),
            entry.recorded["request_headers"].get("Authorization"),
            entry.recorded,
        )
        for entry in exchanges()
    }
    listed = api.examples("errors")
    assert len(listed) == 21
    missing = [e for e in listed if _refusal(e["method"], e["path"], e["authorization"], e) not in played]
    assert missing == []


def _refusal(method: str, path: str, credential: str | None, answer: dict[str, Any]) -> tuple[Any, ...]:
    answered = json.dumps([answer["status"], answer.get("content_type"), answer["body"]], sort_keys=True)
    return method, path, credential, answered


def rows() -> dict[str, list[str]]:
    """The table rows of `docs/deviations.md`: the rules of each id."""
    found = re.findall(r"^\| `(D-[A-Z0-9-]+)` \| ([^|]+) \|", DEVIATIONS.read_text(), re.MULTILINE)
    names = [name for name, _ in found]
    assert len(names) == len(set(names))
    return {name: [rule.strip() for rule in rules.split(",")] for name, rules in found}


def test_every_deviation_is_listed_with_its_rules() -> None:
    """What differs here stands in the document, and the document speaks of rules that exist."""
    listed = rows()
    assert {name for name, _ in DIFFERENCES.values()} | {"D-MORE-FIELDS"} <= set(listed)
    known = trace.rules()
    assert {rule for rules in listed.values() for rule in rules} - set(known) == set()


def test_every_added_key_is_listed() -> None:
    """D-MORE-FIELDS names the keys that only ours has."""
    (row,) = (line for line in DEVIATIONS.read_text().splitlines() if "`D-MORE-FIELDS`" in line)
    assert {name for name in ADDED if f"`{name}`" not in row} == set()
