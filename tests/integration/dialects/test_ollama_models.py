"""Ollama's routes about models (review C6, C12): load, unload, pull, and those that clients may not use."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client
from pytest_django import Settings

from localai_cluster.accounts.models import AuditEntry
from localai_cluster.accounts.principals import create_api_key
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from nodes.definitions import store
from nodes.gateway import gateway
from nodes.loading.definition_removal import RemoveDefinition
from nodes.models import ModelDefinition
from operations.executor.work import Work, write_batch
from operations.ledger import attempts
from operations.ledger.progress import Recorder
from operations.models import Event, Operation
from tests.conftest import until
from tests.support import hot
from tests.support.answering import DEFINITION, definitions, play, reply
from tests.support.bus import PlayedBus
from tests.support.environment import API_KEY
from tests.support.scripted import Scripted, words

__all__ = ["definitions"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("http-6a")]

CHAT, GENERATE, PULL = "/api/chat", "/api/generate", "/api/pull"


def asked(path: str, body: Any, *engines: Scripted, key: str = API_KEY) -> hot.Reply:
    """The reply to one request."""

    async def scenario(_: hot.Client, __: Any) -> hot.Reply:
        return await reply(hot.Client(application, key=key).post(path, body))

    answer: hot.Reply = play(scenario, *engines)
    return answer


def lines(answer: hot.Reply) -> list[Any]:
    """The lines of a stream, or the only object."""
    whole = answer.body
    return [json.loads(line) for line in whole.splitlines()] if isinstance(whole, str) else [whole]


@pytest.mark.parametrize(
    ("path", "body", "content"),
    [
        (GENERATE, {"model": "m", "prompt": ""}, {"response": ""}),
        (GENERATE, {"model": "m"}, {"response": ""}),
        (CHAT, {"model": "m", "messages": []}, {"message": {"role": "assistant", "content": ""}}),
        (CHAT, {"model": "m:latest", "keep_alive": "5m"}, {"message": {"role": "assistant", "content": ""}}),
        (GENERATE, {"model": "m", "keep_alive": "0m1s"}, {"response": ""}),
        (GENERATE, {"model": "m", "keep_alive": "0" * 10_000 + "x"}, {"response": ""}),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_a_request_without_a_prompt_loads_the_model(
    path: str, body: dict[str, Any], content: dict[str, Any], stream: bool
) -> None:
    """C6: it waits for a replica and generates nothing."""
    engine = Scripted()
    answer = asked(path, body | {"stream": stream}, engine)
    assert answer.status == 200
    (end,) = lines(answer)
    assert (end["model"], end["done"], end["done_reason"]) == (body["model"], True, "load")
    assert {name: end[name] for name in content} == content
    assert answer.headers["content-type"] == ("application/x-ndjson" if stream else "application/json")
    assert not engine.asked


@pytest.mark.parametrize("keep_alive", [0, "0", "0s", 0.0, "0m", "0h0m0s", " 0.0ms"])
def test_keep_alive_0_without_a_prompt_unloads(keep_alive: Any) -> None:
    """C6: as the node's page does, by an operation; a model that is not loaded is no error."""
    answer = asked(GENERATE, {"model": "m", "keep_alive": keep_alive, "stream": False}, Scripted())
    assert (answer.status, answer.body["done_reason"]) == (200, "unload")
    (operation,) = Operation.objects.filter(kind="model_unload")
    assert (operation.element, operation.actor) == ("m", "static-key")
    Operation.objects.all().delete()
    assert asked(CHAT, {"model": "m", "messages": [], "keep_alive": 0}).status == 200
    assert not Operation.objects.filter(kind="model_unload").exists()


def test_only_an_administrator_unloads() -> None:
    """A person with a key takes no model away from the others."""
    key = create_api_key(get_user_model().objects.create_user("ann"), "k")[1]
    answer = asked(GENERATE, {"model": "m", "keep_alive": 0}, Scripted(), key=key)
    assert (answer.status, set(answer.body)) == (403, {"error"})
    assert not Operation.objects.exists()
    assert asked(GENERATE, {"model": "m"}, Scripted(), key=key).status == 200


def test_a_prompt_with_keep_alive_0_is_answered() -> None:
    answer = asked(GENERATE, {"model": "m", "prompt": "hi", "keep_alive": 0}, Scripted(["unused"]))
    assert not Operation.objects.filter(kind="model_unload").exists()
    assert answer.status != 403


@pytest.mark.parametrize("body", [{"model": "m"}, {"name": "m", "model": ""}, {"model": "m:latest"}])
def test_pull_of_a_defined_model_succeeds(body: dict[str, Any]) -> None:
    """C6: nothing is fetched."""
    assert lines(asked(PULL, body))[-1] == {"status": "success"}
    whole = asked(PULL, body | {"stream": False})
    assert (whole.body, whole.headers["content-type"]) == ({"status": "success"}, "application/json")


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/push"),
        ("POST", "/api/blobs/sha256:00"),
        ("HEAD", "/api/blobs/sha256:00"),
    ],
)
def test_what_changes_models_says_who_may(method: str, path: str) -> None:
    """C6: a text in `error`; without a key nothing is said."""

    async def scenario(_: hot.Client, __: Any) -> list[hot.Reply]:
        return [
            await reply(hot.Client(application, key=key).request(method, path, b'{"model": "m"}'))
            for key in (API_KEY, None, "wrong")
        ]

    allowed, anonymous, wrong = play(scenario)
    assert allowed.status == 403
    assert "administrators define the models" in allowed.body["error"]
    assert (anonymous.status, wrong.status) == (401, 401)
    assert all(isinstance(answer.body["error"], str) for answer in (allowed, anonymous, wrong))


@pytest.mark.rule("http-0.4")
@pytest.mark.parametrize("path", [PULL, GENERATE, CHAT])
def test_errors_are_texts(path: str) -> None:
    """An administrator's pull would ask the registry of Ollama, that of others nobody."""
    key = create_api_key(get_user_model().objects.create_user("ann"), "k")[1]
    unknown, nothing = asked(path, {"model": "nope"}, key=key), asked(path, {}, key=key)
    assert [unknown.status, nothing.status] == [404, 400]
    assert all(isinstance(answer.body["error"], str) for answer in (unknown, nothing))


def gguf(template: bytes) -> bytes:
    """The beginning of a model's file: some keys, and its chat template."""
    key = b"tokenizer.chat_template"
    text = len(key).to_bytes(8, "little") + key + (8).to_bytes(4, "little")
    return (
        b"GGUF"
        + b"\x03\0\0\0"
        + bytes(32)
        + text
        + len(template).to_bytes(8, "little")
        + template
        + bytes(64)
    )


@pytest.mark.parametrize(
    ("content", "has_tools"),
    [
        (gguf(b"{% if tools %}{{ tools }}{% endif %}"), True),
        (gguf(b"{{ messages }}") + b"tools", False),
        (b"GGUF", False),
        (b"tools", False),
        (gguf(b"")[:-80], False),
    ],
)
def test_show_lists_tools_only_where_the_template_has_them(
    content: bytes, has_tools: bool, definitions: Path
) -> None:
    """C3: Ollama's clients send tools by this."""
    (definitions / "m.gguf").write_bytes(content)
    template = "template: {jinja_template: true, chat: '{{ tools }}'}\n"
    (definitions / "t.yaml").write_text(DEFINITION.replace("name: m", "name: t") + template)
    for model, shown in (("m", has_tools), ("t", True)):
        answer = asked("/api/show", {"model": model})
        assert answer.body["capabilities"] == ["completion", *["tools"] * shown]


def test_tools_that_a_template_cannot_show_are_refused(definitions: Path) -> None:
    """C3: 400 as Ollama does, never thrown away silently."""
    template = "template: {jinja_template: true, chat: '{{ messages[0].content }}'}\n"
    (definitions / "m.yaml").write_text(DEFINITION + template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": False}
    refused = asked(CHAT, body | {"tools": [tool]}, Scripted())
    assert (refused.status, "tools" in refused.body["error"]) == (400, True)
    assert asked(CHAT, body, Scripted(words("Hello"))).status == 200


def test_ollamas_clients_wait_longer_for_a_load(settings: Settings) -> None:
    """C12: up to `CLUSTER_OLLAMA_LOAD_WAIT`, the others as before."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, model_load_wait=0.2, ollama_load_wait=1.2)

    async def scenario(client: hot.Client, _: Any) -> list[float]:
        taken = []
        for path, body in (("/v1/completions", {"prompt": "x"}), (GENERATE, {"prompt": "x"})):
            began = clock.monotonic()
            assert (await reply(client.post(path, {"model": "m", **body}))).status == 503
            taken.append(clock.monotonic() - began)
        return taken

    others, ollamas = play(scenario)
    assert others < 1.0 <= ollamas


@pytest.mark.rule("http-5.2")
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_the_root_says_that_a_server_is_there(db: None, method: str) -> None:
    """C6: to programs; a browser is sent to the page, not for ever."""
    client = Client()
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        answer = client.generic(method, "/", headers=accept)
        assert answer.status_code == 200
        assert answer.content == (b"Ollama is running" if method == "GET" else b"")
    page = client.generic(method, "/?x=1", headers={"Accept": "text/html,*/*"})
    assert (page.status_code, page["Location"]) == (302, "/app?x=1")
    assert Client(enforce_csrf_checks=True).post("/").status_code == 405


def test_the_wait_is_that_of_the_route(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is no limit, for either."""
    monkeypatch.setattr("localai_cluster.kit.clock.monotonic", lambda: 100.0)
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, model_load_wait=60.0, ollama_load_wait=0.0)
    assert gateway.load_wait_deadline() == 160.0
    assert gateway.load_wait_deadline(is_patient=True) == float("inf")


CREATE = "/api/create"


def sent(method: str, path: str, body: Any, key: str | None = API_KEY) -> hot.Reply:
    """The reply to a request with any method."""

    async def scenario(_: hot.Client, __: Any) -> hot.Reply:
        return await reply(hot.Client(application, key=key).request(method, path, json.dumps(body).encode()))

    answer: hot.Reply = play(scenario)
    return answer


def test_a_model_is_created_from_another_and_shown() -> None:
    modelfile = 'FROM m\nPARAMETER num_ctx 512\nPARAMETER stop "x"\nSYSTEM """be\nbrief"""\n'
    created = sent("POST", CREATE, {"name": "brief:latest", "modelfile": modelfile})
    assert (created.status, lines(created)[-1]) == (200, {"status": "success"})
    row = store.find("brief")
    assert row is not None
    assert (row.origin, row.revision) == ("api", 1)
    shown = sent("POST", "/api/show", {"model": "brief"}).body
    assert shown["system"] == "be\nbrief"
    assert shown["model_info"] == {"general.context_length": 512}
    assert "SYSTEM" in shown["modelfile"]
    again = sent(
        "POST", CREATE, {"model": "brief", "from": "brief", "parameters": {"num_ctx": 99}, "stream": False}
    )
    assert again.body == {"status": "success"}
    assert "context_size: 99" in store.revisions_of("brief").get(number=2).text
    audited = AuditEntry.objects.filter(kind="definition.saved").values_list("actor", "subject")
    assert set(audited) == {("static-key", "definition brief")}


def test_the_system_prompt_reaches_the_engine_unless_the_client_has_one(definitions: Path) -> None:
    (definitions / "m.yaml").write_text(DEFINITION + "system_prompt: be brief\n")
    for messages, roles in (
        ([{"role": "user", "content": "hi"}], ["system", "user"]),
        ([{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}], ["system", "user"]),
    ):
        engine = Scripted(words("Hello"))
        body = {"model": "m", "messages": messages, "stream": False}
        assert asked(CHAT, body, engine).status == 200
        (options,) = engine.asked
        assert [message.role for message in options.Messages] == roles
        assert options.Messages[0].content == ("x" if messages[0]["role"] == "system" else "be brief")


def test_a_model_is_created_from_a_file_that_is_here(definitions: Path) -> None:
    (definitions / "w.gguf").write_text("123")
    (definitions / "out.gguf").symlink_to("/etc/hostname")
    assert sent("POST", CREATE, {"model": "w", "from": "./w.gguf"}).status == 200
    tags = sent("GET", "/api/tags", None).body["models"]
    assert [(model["name"], model["size"]) for model in tags] == [("m", 0), ("w", 3)]
    for path in ("nope.gguf", "/etc/passwd", "../x", ".", "out.gguf", "x" * 300, "a\0b"):
        assert sent("POST", CREATE, {"model": "v", "from": path}).status == 404, path


def test_models_whose_file_is_at_its_source_are_listed_copied_and_named() -> None:
    """Each has the file's size, and its record, by which a load finds it."""
    text = "name: left\nbackend: llama-cpp\nparameters: {model: a/w.gguf}\n"
    record = {"path": "a/w.gguf", "size": 3000, "sha256": "a" * 64, "source": "https://h/w.gguf"}
    store.save(None, text, origin="import", actor="ann", now=clock.now(), files=[record])
    assert sent("POST", CREATE, {"model": "made", "from": "a/w.gguf"}).status == 200
    assert sent("POST", "/api/copy", {"source": "left", "destination": "copied"}).status == 200
    tags = sent("GET", "/api/tags", None).body["models"]
    sizes = {model["name"]: model["size"] for model in tags}
    assert sizes == {"m": 0, "left": 3000, "made": 3000, "copied": 3000}
    for name in ("made", "copied"):
        row = store.find(name)
        assert row is not None
        assert row.files == [record]


def shadow(definitions: Path) -> None:
    """Have a stored definition `both`, over which a file with another context wins."""
    text = "name: both\nbackend: echo\nparameters: {model: m}\ncontext_size: 1024\n"
    store.save(None, text, origin="api", actor="ann", now=clock.now())
    (definitions / "both.yaml").write_text(text.replace("1024", "2048"))


def test_the_model_in_force_is_copied_and_the_base_of_others(definitions: Path) -> None:
    """It is what clients of that name get; the shadowed row is another one."""
    shadow(definitions)
    assert sent("POST", "/api/copy", {"source": "both", "destination": "copied"}).status == 200
    assert sent("POST", CREATE, {"model": "made", "from": "both"}).status == 200
    for name in ("copied", "made"):
        row = store.find(name)
        assert row is not None
        assert "2048" in row.text


def test_a_model_that_a_file_defines_too_is_not_deleted(definitions: Path) -> None:
    """Success would say that it is gone, and it would still be served."""
    shadow(definitions)
    answer = sent("DELETE", "/api/delete", {"model": "both"})
    assert (answer.status, "both.yaml" in answer.body["error"]) == (409, True)
    assert store.find("both") is not None


@pytest.mark.parametrize("name", ["llama3.2 latest", "llama3.2 --insecure", " a b "])
def test_a_name_with_blanks_is_not_pulled(name: str) -> None:
    """Only its first word would be, under the whole name."""
    answer = sent("POST", PULL, {"model": name})
    assert (answer.status, answer.body["error"].partition(":")[0]) == (400, "model")


def test_a_model_is_copied_and_deleted() -> None:
    assert sent("POST", "/api/copy", {"source": "m:latest", "destination": "org/copy"}).status == 200
    assert store.find("org/copy") is not None
    assert sent("POST", "/api/copy", {"source": "nope", "destination": "x"}).status == 404

    async def scenario(client: hot.Client, _: Any) -> hot.Reply:
        asking = asyncio.create_task(
            reply(hot.Client(application).request("DELETE", "/api/delete", b'{"model": "org/copy"}'))
        )

        def run() -> bool:
            for operation in attempts.claim("c", now=clock.now(), lease=60, limit=1):
                work = Work(operation, Recorder(write_batch))
                result = asyncio.run(RemoveDefinition(PlayedBus())(work))
                attempts.finish(*work.attempt, Event.COMPLETE, now=clock.now(), result=result)
                return True
            return False

        await until(lambda: hot.in_thread(run))
        return await asking

    answer = play(scenario)
    assert (answer.status, answer.body) == (200, {"status": "success"})
    assert store.find("org/copy") is None


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", CREATE, {"model": "x", "from": "m", "adapters": {"a": "b"}}, 501),
        ("POST", CREATE, {"model": "x", "modelfile": "FROM m\nADAPTER a"}, 501),
        ("POST", CREATE, {"model": "x", "files": {"a.gguf": "sha256:0"}}, 501),
        ("POST", CREATE, {"model": "x", "from": "m", "quantize": "q4_0"}, 501),
        ("POST", CREATE, {"model": "x"}, 400),
        ("POST", CREATE, {"from": "m"}, 400),
        ("POST", CREATE, {"model": "../x", "from": "m"}, 400),
        ("POST", CREATE, {"model": "x" * 300, "from": "m"}, 400),
        ("POST", CREATE, {"model": "x", "from": "m", "parameters": {"num_ctx": "y"}}, 400),
        ("POST", CREATE, {"model": "x", "from": "m", "system": "hf_abcdefghijklmnopqrst"}, 400),
        ("POST", CREATE, {"model": "m", "from": "m"}, 409),
        ("POST", CREATE, {"model": "x", "from": "nope"}, 404),
        ("POST", "/api/copy", {"source": "m"}, 400),
        ("DELETE", "/api/delete", {"model": "m"}, 409),
        ("DELETE", "/api/delete", {"model": "nope"}, 404),
        ("DELETE", "/api/delete", {}, 400),
    ],
)
def test_what_cannot_be_changed_is_refused(method: str, path: str, body: Any, status: int) -> None:
    answer = sent(method, path, body)
    assert (answer.status, isinstance(answer.body["error"], str)) == (status, True), answer.body
    assert not ModelDefinition.objects.exists()


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", CREATE, {"model": "x", "from": "m"}),
        ("POST", "/api/copy", {"source": "m", "destination": "x"}),
        ("DELETE", "/api/delete", {"model": "m"}),
    ],
)
def test_only_administrators_change_models(method: str, path: str, body: Any) -> None:
    key = create_api_key(get_user_model().objects.create_user("ann"), "k")[1]
    assert sent(method, path, body, key).status == 403
    assert sent(method, path, body, None).status == 401
    assert not ModelDefinition.objects.exists()
    assert not Operation.objects.exists()
