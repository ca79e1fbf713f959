"""The reference's pages on our server: their calls in their order, without our token (`http-api.md` §5)."""

import json
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from localai_cluster.accounts import principals
from localai_cluster.kit import clock, logs
from localai_cluster.web import throttle
from nodes.backends import intents
from nodes.models import ModelSchedulingConfig, NodeBackend
from operations.ledger.progress import Tick
from tests.support import api, hot
from tests.support import intents as wished
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db

PASSWORD = "a long first sentence"
HERE = "http://testserver"
STATUS_KEYS = {"authEnabled", "staticApiKeyRequired", "providers", "hasUsers", "registrationMode", "user"}


@dataclass
class StockPage:
    """A tab with the reference's pages: cookies and the headers of its browser, no token of ours."""

    site: dict[str, str] = field(default_factory=lambda: {"Sec-Fetch-Site": "same-origin"})
    client: Client = field(
        default_factory=lambda: Client(
            raise_request_exception=False, enforce_csrf_checks=True, REMOTE_ADDR="192.0.2.9"
        )
    )

    def get(self, path: str) -> Any:
        """GET, with the content type that the reference's helper puts on every call."""
        return self.client.get(path, headers={"Content-Type": "application/json", **self.site})

    def send(self, method: str, path: str, body: Any = None) -> Any:
        """A change; what has no body is `{}`."""
        return self.client.generic(
            method, path, json.dumps(body or {}), content_type="application/json", headers=self.site
        )

    def post(self, path: str, body: Any = None) -> Any:
        """POST."""
        return self.send("POST", path, body)

    def user(self) -> Any:
        """Who is signed in."""
        return self.get("/api/auth/status").json()["user"]


@pytest.fixture
def ann() -> Any:
    """An administrator with a password of her own."""
    return get_user_model().objects.create_user("ann", email="a@b.c", password=PASSWORD, is_staff=True)


@pytest.fixture
def two_keys(settings: Any) -> tuple[str, str]:
    """Two static keys."""
    keys = API_KEY, "another-static-key-of-tests"
    settings.CLUSTER = replace(settings.CLUSTER, api_keys=keys)
    return keys


# Signing in


@pytest.mark.rule("http-5.3", "http-5.4", "http-0.3")
@pytest.mark.parametrize(
    "site", [{"Sec-Fetch-Site": "same-origin"}, {"Origin": HERE}], ids=["over TLS", "plain HTTP"]
)
def test_a_person_signs_in_works_and_signs_out(ann: Any, site: dict[str, str]) -> None:
    """D-SIGN-IN: branding and status first, then the password, a change, and the way out."""
    page = StockPage(site)
    assert page.get("/api/branding").status_code == 200
    status = page.get("/api/auth/status").json()
    assert set(status) == STATUS_KEYS
    assert (status["user"], status["authEnabled"], status["hasUsers"]) == (None, True, True)
    refused = page.post("/api/auth/login", {"email": "a@b.c", "password": "wrong"})
    assert (refused.status_code, set(refused.json())) == (401, {"error"})
    signed_in = page.post("/api/auth/login", {"email": "ann", "password": PASSWORD})
    assert (signed_in.status_code, signed_in.json()["user"]["role"]) == (200, "admin")
    node = api.make_node(approved=False)
    assert page.post(f"/api/nodes/{node.id}/approve").status_code == 200
    assert page.post("/api/auth/logout").status_code == 200
    assert page.user() is None
    assert page.get("/api/nodes").status_code == 401


@pytest.mark.rule("http-5.4", "http-0.2")
def test_a_static_key_signs_in_as_its_user(two_keys: tuple[str, str]) -> None:
    """§5.4: one token field; the user that the key maps to, an administrator, in the status too."""
    recorded = next(item for item in api.examples("shell") if item["name"].startswith("auth status"))["body"]
    for key in two_keys:
        page = StockPage()
        answer = page.post("/api/auth/token-login", {"token": key})
        user = answer.json()["user"]
        assert answer.status_code == 200
        for given in (user, page.user(), api.bearer(key).get("/api/auth/status").json()["user"]):
            assert given | {"permissions": {}} == recorded["user"] | {
                "permissions": {},
                "mustChangePassword": False,
            }
            assert set(given["permissions"]) == set(recorded["user"]["permissions"])
        assert page.get("/api/auth/status").json()["hasUsers"] is False
        cookie = page.client.cookies["sessionid"]
        assert (cookie["httponly"], cookie["samesite"]) == (True, "Lax")
        assert key not in str(dict(page.client.session))
        assert page.get("/api/nodes").status_code == 200
        node = api.make_node(f"w-{key[:4]}", approved=False)
        assert page.post(f"/api/nodes/{node.id}/approve").status_code == 200
        assert page.post("/api/auth/logout").status_code == 200
        assert page.get("/api/nodes").status_code == 401


def test_a_session_of_a_static_key_ends_with_the_key(two_keys: tuple[str, str], settings: Any) -> None:
    """What the operator removes or replaces opens nothing any more; the other key goes on."""
    pages = [StockPage() for _ in two_keys]
    for page, key in zip(pages, two_keys, strict=True):
        assert page.post("/api/auth/token-login", {"token": key}).status_code == 200
    settings.CLUSTER = replace(settings.CLUSTER, api_keys=(two_keys[0], "one-more-static-key-of-tests"))
    assert [page.get("/api/nodes").status_code for page in pages] == [200, 401]
    settings.CLUSTER = replace(settings.CLUSTER, api_keys=())
    assert [page.get("/api/nodes").status_code for page in pages] == [401, 401]


@pytest.mark.parametrize("ends", ["revoked", "inactive", "deleted"])
def test_a_session_of_a_persons_key_ends_with_the_key(ann: Any, ends: str) -> None:
    """It is that person, with the key's end."""
    row, key = principals.create_api_key(ann, "k")
    page = StockPage()
    signed_in = page.post("/api/auth/token-login", {"token": key})
    assert signed_in.json()["user"]["name"] == page.user()["name"] == "ann"
    assert page.get("/api/nodes").status_code == 200
    if ends == "revoked":
        row.revoked_at = clock.now()
        row.save()
    elif ends == "inactive":
        get_user_model().objects.update(is_active=False)
    else:
        row.delete()
    assert page.get("/api/nodes").status_code == 401
    assert page.user() is None


def test_a_key_that_is_no_administrators_opens_no_more_than_it_does(ann: Any) -> None:
    get_user_model().objects.update(is_staff=False)
    page = StockPage()
    page.post("/api/auth/token-login", {"token": principals.create_api_key(ann, "k")[1]})
    assert page.user()["role"] == "user"
    assert page.get("/api/nodes").status_code == 403


def test_a_session_of_a_key_changes_no_password_and_opens_no_admin(ann: Any) -> None:
    """A key that leaked must not become a password."""
    get_user_model().objects.update(is_superuser=True)
    for key in (API_KEY, principals.create_api_key(ann, "k")[1]):
        page = StockPage()
        page.post("/api/auth/token-login", {"token": key})
        changed = page.post("/api/auth/password", {"old": PASSWORD, "new": "another long sentence"})
        assert (changed.status_code, set(changed.json())) == (403, {"error"})
        assert page.get("/admin/auth/user/").status_code == 302
    ann.refresh_from_db()
    assert ann.check_password(PASSWORD)


def test_the_key_of_a_node_begins_no_session(ann: Any) -> None:
    agent = get_user_model().objects.create_user("agent-worker:a")
    key = principals.create_agent_key(agent, "a")[1]
    assert StockPage().post("/api/auth/token-login", {"token": key}).status_code == 401
    assert api.bearer(key).get("/version").status_code == 200


@pytest.mark.rule("http-0.4", "http-5.4")
@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token": "wrong"}, 401),
        ({"token": "lac-" + "0" * 48}, 401),
        ({"token": "\u00fc"}, 401),
        ({"token": f"{API_KEY},another-static-key-of-tests"}, 401),
        ({}, 400),
        ({"token": None}, 400),
        ({"token": ["x"]}, 400),
        ({"token": "x" * 5000}, 400),
    ],
)
def test_a_token_that_is_none(two_keys: tuple[str, str], body: Any, status: int) -> None:
    refused = StockPage().post("/api/auth/token-login", body)
    assert refused.status_code == status
    assert set(refused.json()) <= {"error", "field"}
    assert "sessionid" not in refused.cookies


@pytest.mark.rule("http-5.4")
def test_five_wrong_tokens_a_minute(failed_sign_ins: throttle.Failures, minute: None) -> None:
    """§5.4: then 429 for the right one too; passwords and tokens are counted together."""
    page = StockPage()
    for _ in range(throttle.SIGN_IN_FAILURE_LIMIT):
        assert page.post("/api/auth/token-login", {"token": "wrong"}).status_code == 401
    assert page.post("/api/auth/token-login", {"token": API_KEY}).status_code == 429
    assert page.post("/api/auth/login", {"email": "ann", "password": PASSWORD}).status_code == 429


def test_the_status_is_no_way_to_try_keys(failed_keys: throttle.Failures, minute: None) -> None:
    """D-FAILED-TOKENS: a wrong key is counted there as anywhere."""
    caller = api.bearer("wrong")
    answers = [caller.get("/api/auth/status") for _ in range(throttle.DEFAULT_LIMIT + 1)]
    assert {answer.json()["user"] for answer in answers[:-1]} == {None}
    assert answers[-1].status_code == 429


@pytest.mark.rule("http-0.1")
@pytest.mark.parametrize(
    "site",
    [
        {},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin, cross-site"},
        {"Sec-Fetch-Site": "", "Origin": HERE},
        {"Sec-Fetch-Site": "cross-site", "Origin": HERE},
        {"Origin": "http://elsewhere.test"},
        {"Origin": "https://testserver"},
        {"Origin": "http://testserver:8081"},
        {"Origin": "null"},
        {"Origin": f"{HERE}/"},
        {"Referer": f"{HERE}/app"},
    ],
)
def test_no_other_page_signs_in_or_changes_anything(ann: Any, site: dict[str, str]) -> None:
    """403 without a token of ours, and nothing has happened; a session that is there stays as it is."""
    page = StockPage()
    page.post("/api/auth/login", {"email": "ann", "password": PASSWORD})
    node = api.make_node(approved=False)
    page.site = site
    calls: tuple[tuple[str, Any], ...]
    calls = ("logout", {}), ("token-login", {"token": API_KEY}), ("login", {"email": "b", "password": "x"})
    for route, body in calls:
        assert page.post(f"/api/auth/{route}", body).status_code == 403
    assert page.post(f"/api/nodes/{node.id}/approve").status_code == 403
    assert api.node(node.id).status == "pending"
    assert page.user()["name"] == "ann"


def test_a_key_in_a_list_is_a_key_and_the_list_is_none(two_keys: tuple[str, str]) -> None:
    """Several keys in `LOCALAI_API_KEY`: each is the administrator's."""
    assert [api.bearer(key).get("/api/nodes").status_code for key in two_keys] == [200, 200]
    assert api.bearer(",".join(two_keys)).get("/api/nodes").status_code == 401
    assert api.bearer(two_keys[0][:-1]).get("/api/nodes").status_code == 401


# The pages behind the sign-in


@pytest.fixture
def models(tmp_path: Path, settings: Any) -> Path:
    """A models folder with four definitions."""
    files = {
        "talk": "name: talk\nbackend: llama-cpp\nparameters: {model: talk.gguf, temperature: 0.2}\n",
        "see": "name: org/see\nbackend: llama-cpp\nmmproj: p.gguf\nparameters: {model: see.gguf}\n",
        "find": "name: find\nbackend: minilm\nembeddings: true\nparameters: {model: find}\n",
        "said": "name: said\nbackend: x\nknown_usecases: [FLAG_CHAT, tts, nope]\nparameters: {model: said}\n",
        "hear": "name: hear\nbackend: cuda12-whisper\nparameters: {model: hear}\n",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "broken.yaml").write_text("name: broken\n")
    settings.CLUSTER = replace(settings.CLUSTER, models_path=tmp_path)
    return tmp_path


def signed_in() -> StockPage:
    """A page that a static key signed in."""
    page = StockPage()
    assert page.post("/api/auth/token-login", {"token": API_KEY}).status_code == 200
    return page


# In the order in which the shell and the pages call them; what is not built is 404.
SHELL = (
    *("/api/branding", "/api/auth/status", "/api/operations", "/version", "/api/features"),
    *("/api/backends/upgrades", "/backends", "/api/models/capabilities", "/api/resources"),
    *("/api/nodes", "/system", "/api/resources", "/api/operations/history", "/api/nodes/models"),
    *("/api/nodes/scheduling", "/api/backends", "/api/backends/usecases"),
    "/api/models?page=1&items=9",
)
NOT_BUILT = (
    *("/api/traces/summary", "/api/aliases"),
    *(
        "/api/agents",
        "/api/agents/skills",
        "/api/agent/jobs",
        "/api/fine-tuning/jobs",
        "/api/quantization/jobs",
    ),
    *(
        "/api/settings",
        "/api/traces",
        "/api/backend-traces",
        "/api/p2p/workers",
        "/api/storage",
        "/api/usage",
    ),
    *("/api/auth/users", "/api/auth/quota", "/api/pii/events", "/api/mcp/servers"),
)


@pytest.mark.rule("http-5.3", "http-0.3", "http-0.4", "http-0.6", "http-5.1")
def test_the_shell_starts_and_what_is_missing_is_a_quiet_404(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """§5.3: every call of the shell is answered; the rest degrades alone, without a line in the log."""
    page = signed_in()
    with caplog.at_level(logging.WARNING):
        for path in SHELL:
            answer = page.get(path)
            assert (answer.status_code, answer["Content-Type"]) == (200, "application/json"), path
        for path in NOT_BUILT:
            for ask in (page.get, page.get, page.post):
                answer = ask(path)
                assert (answer.status_code, answer["Content-Type"]) == (404, "application/json"), path
                assert set(answer.json()["error"]) == {"code", "message", "type"}
    written = [record.getMessage() for record in caplog.records if filtered(record)]
    assert written == ["Model definition broken.yaml has no `parameters` section"], "once"


def filtered(record: logging.LogRecord) -> bool:
    """Whether the record reaches the log, after the filters of our settings."""
    return record.name != "django.request" or logs.NoExpectedRefusals().filter(record)


@pytest.mark.rule("http-0.3", "http-0.2")
def test_nothing_of_it_is_for_everyone(models: Path) -> None:
    """§0.3: without a session branding and status only, and they tell nothing."""
    page = StockPage()
    for path in SHELL[2:]:
        assert page.get(path).status_code == 401, path
    for method, path in (
        ("PUT", "/models/toggle-pinned/talk/pin"),
        ("POST", "/models/reload"),
        ("GET", "/api/models/config-json/talk"),
        ("POST", "/backend/load"),
        ("POST", "/backend/shutdown"),
    ):
        assert page.send(method, path).status_code == 401, path


@pytest.mark.rule("http-5.4")
def test_models_state_their_use_cases(models: Path, ann: Any) -> None:
    """§5.4: by `known_usecases`, otherwise by what the engine does; so the reference's Chat offers them."""
    page = signed_in()
    listed = {model["id"]: model for model in page.get("/api/models/capabilities").json()["data"]}
    flags = {name: set(model["capabilities"]) for name, model in listed.items()}
    text = {"FLAG_CHAT", "FLAG_COMPLETION", "FLAG_TOKENIZE"}
    assert flags == {
        "talk": text,
        "org/see": text | {"FLAG_VISION"},
        "find": {"FLAG_EMBEDDINGS"},
        "said": {"FLAG_CHAT", "FLAG_TTS"},
        "hear": {"FLAG_TRANSCRIPT"},
    }
    assert listed["said"]["warnings"] == ["`known_usecases` has the unknown name 'nope'"]
    node = api.make_node()
    api.replica(node, "talk")
    api.replica(node, "strange", backend_type="whisper")
    listed = {model["id"]: model for model in page.get("/api/models/capabilities").json()["data"]}
    assert listed["talk"]["loaded_on"][0]["node_name"] == node.name
    assert (listed["strange"]["capabilities"], listed["strange"]["source"]) == (
        ["FLAG_TRANSCRIPT"],
        "registry-only",
    )


def test_who_is_no_administrator_is_told_models_and_no_nodes(models: Path, ann: Any) -> None:
    """§5.3: `capabilities` is for every user."""
    get_user_model().objects.update(is_staff=False)
    api.replica(api.make_node(), "talk")
    page = StockPage()
    page.post("/api/auth/login", {"email": "ann", "password": PASSWORD})
    body = page.get("/api/models/capabilities").json()
    assert {model["id"] for model in body["data"]} >= {"talk", "find"}
    assert body["definitionErrors"] == []
    assert not any("loaded_on" in model for model in body["data"])
    assert [page.get(path).status_code for path in ("/system", "/api/resources")] == [403, 403]


@pytest.mark.rule("http-5.4")
def test_system_and_resources_have_the_recorded_shape(models: Path) -> None:
    """§5.4: of all healthy nodes; every recorded key is there with its type."""
    page = signed_in()
    (models / "talk.gguf").write_bytes(b"x" * 1000)
    recorded = {item["path"]: item["body"] for item in api.examples("shell")}
    resources = page.get("/api/resources").json()
    assert (resources["available"], resources["type"], resources["gpus"]) == (False, "ram", None)
    node = api.make_node(total_ram=1000, available_ram=250, total_vram=0)
    hot.node("with-gpu", total_vram=4000, available_vram=1000, gpu_vendor="nvidia", total_ram=1000)
    hot.node("silent", total_vram=9000, offline_at=clock.now())
    api.replica(node, "talk", backend_type="llama-cpp")
    NodeBackend.objects.create(node=node, name="llama-cpp")
    resources = page.get("/api/resources").json()
    for name, value in recorded["/api/resources"].items():
        if name != "gpus":
            assert shapes(resources[name]) == shapes(value), name
    assert set(resources["aggregate"]) == set(recorded["/api/resources"]["aggregate"])
    assert set(resources["ram"]) == set(recorded["/api/resources"]["ram"])
    (gpu,) = resources["gpus"]
    assert (gpu["name"], gpu["used_vram"], gpu["usage_percent"]) == ("GPU on with-gpu", 3000, 75.0)
    assert resources["aggregate"]["total_memory"] == 4000
    assert (resources["ram"]["total"], resources["ram"]["used"]) == (2000, 1750)
    assert page.get("/system").json() == {
        "backends": ["llama-cpp"],
        "loaded_models": [{"id": "talk", "backend": "llama-cpp"}],
    }


@pytest.mark.rule("http-5.4")
def test_a_model_is_pinned_shown_and_read_again(models: Path) -> None:
    """Pin is a minimum of 1 in its rule, whose rest stays; reload sees a new file at once."""
    page = signed_in()

    def pinned() -> set[str]:
        listed = page.get("/api/models/capabilities").json()["data"]
        return {model["id"] for model in listed if model["pinned"]}

    rule_of_talk = {"model_name": "talk", "node_selector": {"a": "b"}, "max_replicas": 3}
    api.admin().post("/api/nodes/scheduling", rule_of_talk)
    for model in ("talk", "org/see"):
        changed = page.send("PUT", f"/models/toggle-pinned/{model}/pin")
        assert (changed.status_code, changed.json()["success"]) == (200, True)
    assert pinned() == {"talk", "org/see"}
    rule = ModelSchedulingConfig.objects.get(model_name="talk")
    assert (rule.min_replicas, rule.max_replicas, rule.node_selector) == (1, 3, {"a": "b"})
    for _ in range(2):
        for model in ("talk", "org/see"):
            assert page.send("PUT", f"/models/toggle-pinned/{model}/unpin").status_code == 200
    assert pinned() == set()
    assert list(ModelSchedulingConfig.objects.values_list("model_name", "max_replicas")) == [("talk", 3)]
    for path in ("nope/pin", "talk/throw"):
        refused = page.send("PUT", f"/models/toggle-pinned/{path}")
        assert (refused.status_code, set(refused.json())) == (404, {"error"})
    api.admin().post("/api/nodes/scheduling", {"model_name": "find", "spread_all": True})
    assert page.send("PUT", "/models/toggle-pinned/find/unpin").status_code == 409
    assert page.send("PUT", "/models/toggle-pinned/find/pin").status_code == 200
    assert page.get("/api/models/config-json/org/see").json()["mmproj"] == "p.gguf"
    assert page.get("/api/models/config-json/nope").json() == {"error": "model configuration not found"}
    odd = "name: odd\nbackend: x\nparameters: {model: odd}\nlogit_bias: {50256: -100}\n"
    (models / "odd.yaml").write_text(
        odd + "feature_flags: {on: true}\nbig: 99999999999999999999\nhalf: .inf\n"
    )
    assert page.post("/models/reload").status_code == 200
    shown = page.get("/api/models/config-json/odd").json()
    assert (shown["logit_bias"], shown["feature_flags"]) == ({"50256": -100}, {"true": True})
    assert (shown["big"], shown["half"]) == ("99999999999999999999", None)
    (models / "odd.yaml").unlink()
    (models / "new.yaml").write_text("name: new\nbackend: x\nparameters: {model: new}\n")
    reloaded = page.post("/models/reload")
    assert reloaded.json() == {"success": True, "message": "6 models are defined", "pending_cleanup": 0}
    assert "new" in {model["id"] for model in page.get("/api/models/capabilities").json()["data"]}


def shapes(value: Any) -> Any:
    """The keys and kinds of a value; a list is that of its first element, null any list."""
    if isinstance(value, dict):
        return {name: shapes(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [shapes(value[0])] if value else []
    return (
        "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
    )


@pytest.mark.rule("http-3.2", "O44")
def test_a_running_install_is_listed_as_recorded() -> None:
    """`phase`, bytes and the part of each node; D-TASK-TYPES, D-MORE-OF-OPERATIONS."""
    recorded = api.examples("install-progress")[1]["body"]["operations"][0]
    page = signed_in()
    wished.ask(wished.INSTALL, hot.node())
    (waiting,) = page.get("/api/operations").json()["operations"]
    assert (waiting["phase"], waiting["isQueued"]) == ("queued", True)
    (intent,) = wished.claim()
    tick = Tick("downloading", "f", 6920601, 81579212, 8.5, "Downloading 1/3", intent.node.id, "one")
    intents.record({(intent.id, intent.fence): [tick]}, now=clock.now())
    (entry,) = page.get("/api/operations").json()["operations"]
    for name, value in recorded.items():
        if name == "nodes":
            assert {key: shapes(entry["nodes"][0][key]) for key in value[0]} == shapes(value[0])
        else:
            assert shapes(entry[name]) == shapes(value), name
    assert (entry["phase"], entry["isQueued"]) == ("downloading", False)
    assert entry["nodes"][0]["phase"] == "downloading"


@pytest.mark.rule("http-4.1", "http-4.5", "http-0.5")
def test_the_catalogue_has_the_recorded_shape(tmp_path: Path, settings: Any) -> None:
    """`tags` and `urls` of an entry; D-CATALOGUE-NODES: a list that is missing in the gallery is empty."""
    index = tmp_path / "index.yaml"
    index.write_text(
        "- {name: mock, description: mock engine, license: mit, version: 1.0.0, uri: /srv/mock,"
        " tags: [text-to-text, CPU], urls: [https://example.org]}\n"
        "- {name: bare, uri: /srv/bare}\n"
    )
    galleries = [{"name": "local", "url": index.as_uri()}]
    settings.CLUSTER = replace(settings.CLUSTER, galleries=galleries)
    recorded = {item["path"]: item["body"] for item in api.examples("backends")}
    page = signed_in()
    body = page.get("/api/backends").json()
    assert set(recorded["/api/backends"]) <= set(body)
    mock, bare = sorted(body["backends"], key=lambda entry: -len(entry["name"]) * (entry["name"] == "mock"))
    assert set(recorded["/api/backends"]["backends"][0]) <= set(mock)
    assert (mock["tags"], mock["urls"]) == (["text-to-text", "CPU"], ["https://example.org"])
    assert (bare["tags"], bare["urls"], bare["nodes"]) == ([], [], [])
    available = {entry["name"]: entry for entry in page.get("/backends/available").json()}
    assert available["mock"]["tags"] == ["text-to-text", "CPU"]
    assert "tags" not in available["bare"]
