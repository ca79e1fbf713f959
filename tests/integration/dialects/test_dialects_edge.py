"""Anthropic's, OpenAI's newer and Ollama's dialect through the edge, with a scripted engine over gRPC."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from pytest_django import Settings

from localai_cluster.asgi import application
from localai_cluster.rpc.messages import Reply
from localai_cluster.web import wire
from nodes.gateway import streams
from nodes.models import BackendNode
from tests.conftest import until
from tests.support import hot
from tests.support.answering import CHAT, DEFINITION, finished, one, play, reply, streamed
from tests.support.environment import API_KEY
from tests.support.scripted import CUT, Refusal, Scripted, call, words
from tests.support.streaming import asked

pytestmark = pytest.mark.django_db(transaction=True)

MESSAGES, RESPONSES, OLLAMA, GENERATE = "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"
USER = {"role": "user", "content": "hello there"}
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "m", "max_tokens": 9, "messages": [USER]},
    RESPONSES: {"model": "m", "input": "hello there"},
    OLLAMA: {"model": "m", "messages": [USER], "stream": False},
    GENERATE: {"model": "m", "prompt": "hello there", "stream": False},
}
EVERY = pytest.mark.parametrize("path", BODIES, ids=["messages", "responses", "chat", "generate"])
SSE, NDJSON = "text/event-stream; charset=utf-8", "application/x-ndjson"
KINDS = {MESSAGES: SSE, RESPONSES: SSE, OLLAMA: NDJSON, GENERATE: NDJSON}


@pytest.fixture(autouse=True)
def definitions(tmp_path: Path, settings: Settings) -> Path:
    """A models folder with `m`; requests hardly wait for a load."""
    (tmp_path / "m.yaml").write_text(DEFINITION)
    settings.CLUSTER = dataclasses.replace(
        settings.CLUSTER, models_path=tmp_path, model_load_wait=0.2, ollama_load_wait=0.2
    )
    return tmp_path


def text_of(path: str, body: Any) -> str:
    """What a whole answer says."""
    if path == MESSAGES:
        return "".join(block["text"] for block in body["content"])
    if path == RESPONSES:
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    return str(body["message"]["content"] if path == OLLAMA else body["response"])


def told(path: str, raw: bytes) -> list[Any]:
    """The events or lines of a stream, as JSON."""
    if KINDS[path] == NDJSON:
        return [json.loads(line) for line in raw.splitlines()]
    datas = (line for line in raw.decode().splitlines() if line.startswith("data: "))
    return [json.loads(line.removeprefix("data: ")) for line in datas]


def pieces(path: str, events: list[Any]) -> str:
    """What a stream says."""
    if path == MESSAGES:
        return "".join(event["delta"].get("text", "") for event in events if "delta" in event)
    if path == RESPONSES:
        return "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    return "".join(text_of(path, line) for line in events if "error" not in line)


@pytest.mark.rule("http-6a", "http-6.3")
@EVERY
def test_a_whole_answer(path: str, settings: Settings) -> None:
    """The same conversation for the engine in every dialect; the node is told if that is switched on."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, expose_node_header=True)
    answer, engine = one(BODIES[path], words("This is an answer."), path)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert text_of(path, answer.body) == "This is an answer."
    (options,) = engine.asked
    assert [(said.role, said.content) for said in options.Messages] == [("user", "hello there")]
    assert options.CorrelationId == answer.headers["x-correlation-id"]
    assert answer.headers["x-localai-node"] == str(BackendNode.objects.get().id)


@pytest.mark.rule("http-6a")
@EVERY
def test_a_streamed_answer(path: str) -> None:
    streaming = BODIES[path] | {"stream": True}
    answer = play(lambda *_: finished(streaming, path), Scripted(words("One two three")))
    assert (answer.status, answer.whole) == (200, True)
    assert answer.headers["content-type"] == KINDS[path]
    events = told(path, answer.taken)
    assert pieces(path, events) == "One two three"
    last = events[-1]
    assert last.get("type", last.get("done")) in ("message_stop", "response.completed", True)


def test_ollama_streams_unless_it_is_told_not_to() -> None:
    asking = {name: value for name, value in BODIES[OLLAMA].items() if name != "stream"}
    answer = play(lambda *_: finished(asking, OLLAMA), Scripted(words("One two")))
    *_, last = told(OLLAMA, answer.taken)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "stop", 2)
    assert last["total_duration"] >= last["eval_duration"] >= 0


@pytest.mark.parametrize("said", [20.0, 0.0, float("nan"), -5.0, 1e9], ids=str)
def test_what_the_prompt_of_a_whole_answer_took_is_what_the_engine_says(said: float) -> None:
    """Within what was measured; the rest of that made the answer."""
    script = [0.05, Reply(message=b"One", tokens=1, prompt_tokens=7, timing_prompt_processing=said)]
    answer, _ = one(BODIES[OLLAMA], script, OLLAMA)
    prompt, rest = answer.body["prompt_eval_duration"], answer.body["eval_duration"]
    measured = answer.body["total_duration"] - answer.body["load_duration"]
    assert prompt + rest == pytest.approx(measured, abs=10)
    expected = {20.0: 20_000_000, 1e9: prompt}.get(said, 0)
    assert prompt == pytest.approx(expected, abs=10)
    assert (prompt > 0) is (said > 0)


@pytest.mark.rule("http-6a", "grpc-Predict", "grpc-PredictStream")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (r'"\n\u00e9"', ("stop_sequence", "\n\u00e9")),
        ('"of the definition"', ("end_turn", None)),
        (r'["\n\u00e9"]', ("end_turn", None)),
        ("no JSON", ("end_turn", None)),
        (None, ("end_turn", None)),
    ],
)
def test_the_stop_word_that_ended_an_answer(
    told: str | None, expected: tuple[str, str | None], stream: bool
) -> None:
    """C10: if the engine says it, and only a word of the request."""
    script = [*words("One two"), {"localai-stop-word": told} if told else {}]
    body = BODIES[MESSAGES] | {"stop_sequences": ["x", "\n\u00e9"]}
    if stream:
        lines = streamed(body, script, MESSAGES).taken.decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        (end,) = [event["delta"] for event in events if event["type"] == "message_delta"]
    else:
        end = one(body, script, MESSAGES)[0].body
    assert (end["stop_reason"], end["stop_sequence"]) == expected


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES, OLLAMA], ids=["messages", "responses", "chat"])
def test_tools_whole_and_streamed(path: str) -> None:
    """The same call either way, with the same id."""
    function = {"name": "weather", "parameters": {"type": "object"}}
    tool: dict[str, Any] = {
        MESSAGES: {"name": "weather", "input_schema": {"type": "object"}},
        RESPONSES: {"type": "function", **function},
        OLLAMA: {"type": "function", "function": function},
    }[path]
    body = BODIES[path] | {"tools": [tool]}
    script = call(0, "weather", '{"city":', ' "Rome"}', id="call_1")
    answer, engine = one(body, script, path)
    assert json.loads(engine.asked[0].Tools)[0]["function"]["name"] == "weather"
    streamed = play(lambda *_: finished(body | {"stream": True}, path), Scripted(script))
    events = told(path, streamed.taken)
    if path == MESSAGES:
        assert answer.body["stop_reason"] == "tool_use"
        (block,) = answer.body["content"]
        assert (block["id"], block["input"]) == ("call_1", {"city": "Rome"})
        parts = [
            event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", ())
        ]
        assert json.loads("".join(parts)) == {"city": "Rome"}
    elif path == RESPONSES:
        (item,) = answer.body["output"]
        assert (item["type"], item["call_id"]) == ("function_call", "call_1")
        done = next(event for event in events if event["type"] == "response.function_call_arguments.done")
        assert done["arguments"] == item["arguments"] == '{"city": "Rome"}'
    else:
        (made,) = answer.body["message"]["tool_calls"]
        assert (made["id"], made["function"]["arguments"]) == ("call_1", {"city": "Rome"})
        assert [line["message"].get("tool_calls") for line in events] == [[made], None]


def message_of(path: str, body: Any) -> str:
    """The text of a refusal, in the dialect's envelope."""
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        return str(body["error"])
    if path.startswith(MESSAGES):
        assert (set(body), body["type"]) == ({"type", "error"}, "error")
        assert set(body["error"]) == {"type", "message"}
    return str(body["error"]["message"])


@pytest.mark.rule("http-6.1")
@EVERY
def test_refusals_have_their_status_and_the_dialects_envelope(path: str) -> None:
    """Streamed or not; a model that does not load in time is a 503 before the first byte."""

    async def scenario(client: hot.Client, _: Any) -> None:
        async def refused(body: Any, status: int, key: str | None = API_KEY) -> hot.Reply:
            answer = await reply(hot.Client(application, key).post(path, body))
            assert (answer.status, bool(message_of(path, answer.body))) == (status, True)
            return answer

        for stream in (True, False):
            good = BODIES[path] | {"stream": stream}
            await refused(good | {"model": "none"}, 404)
            assert "model" in message_of(path, (await refused(good | {"model": 5}, 400)).body)
            waiting = await refused(good, 503)
            assert int(waiting.headers["retry-after"]) >= 5
            assert "www-authenticate" in (await refused(good, 401, "wrong")).headers
            await refused(good, 401, None)
        await refused(b"[" * 1000, 400)
        await refused(b" " * (8 * 1024 * 1024 + 1), 413)
        wrong = await reply(client.request("GET", path))
        assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
        message_of(path, wrong.body)

    play(scenario)


@pytest.mark.rule("http-6.1")
@EVERY
def test_refusals_of_the_process_have_the_dialects_envelope(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that stops, and of one with a defect."""

    async def scenario(client: hot.Client, _: Any) -> None:
        with monkeypatch.context() as defect:
            defect.setattr(wire, "parse_json_object", None)
            failed = await reply(client.post(path, BODIES[path]))
        assert (failed.status, message_of(path, failed.body)) == (500, "internal error")
        monkeypatch.setattr(application, "stopping", True)
        away = await reply(client.post(path, BODIES[path]))
        assert (away.status, away.headers["retry-after"]) == (503, "1")
        assert message_of(path, away.body) == "this web process is stopping"

    play(scenario)


@EVERY
def test_an_engine_that_dies_mid_stream_ends_it_with_an_error(path: str) -> None:
    """In the dialect's own form, after what was said."""
    streaming = BODIES[path] | {"stream": True}
    answer = play(lambda *_: finished(streaming, path), Scripted([*words("Half an"), 0.1, CUT]))
    events = told(path, answer.taken)
    assert (answer.status, answer.whole, pieces(path, events)) == (200, True, "Half an")
    if path == RESPONSES:
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    elif path == MESSAGES:
        assert events[-1]["error"]["type"] == "overloaded_error"
    else:
        assert set(events[-1]) == {"error"}


@EVERY
def test_an_engine_that_thinks_is_waited_for_with_keep_alives(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is an event to a client: it reads the same answer."""
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.01)

    async def scenario(*_: Any) -> Any:
        async with asked(application, path, BODIES[path] | {"stream": True}) as (answer, work):
            while not answer.taken:
                await answer.news()
            gate.set()
            await work
            return answer

    gate = asyncio.Event()
    answer = play(scenario, Scripted([gate, *words("One two")]))
    kept = {MESSAGES: b"event: ping", RESPONSES: b": working", OLLAMA: b" ", GENERATE: b" "}[path]
    assert answer.taken.startswith(kept)
    assert pieces(path, told(path, answer.taken)) == "One two"


@pytest.mark.rule("http-0.2")
def test_a_key_of_anthropics_clients_is_a_key() -> None:
    """`x-api-key`, and a version that is not looked at."""

    async def scenario(*_: Any) -> hot.Reply:
        headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01", "anthropic-beta": "x"}
        return await reply(hot.Client(application, None).post(MESSAGES, BODIES[MESSAGES], headers=headers))

    answer = play(scenario, Scripted(words("Yes")))
    assert text_of(MESSAGES, answer.body) == "Yes"


@pytest.mark.rule("http-6a", "http-6b", "http-6c", "http-6d")
def test_routes_exist_without_the_prefix_too() -> None:
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": [USER]},
        "/v1/completions": {"prompt": "x"},
        MESSAGES: {"messages": [USER], "max_tokens": 9},
        "/v1/messages/count_tokens": {"messages": [USER]},
        RESPONSES: {"input": "x"},
        "/v1/embeddings": {"input": "x"},
        "/v1/tokenize": {"content": "x"},
        "/v1/detokenize": {"tokens": [1]},
        "/v1/rerank": {"query": "x", "documents": ["y"]},
    }

    async def scenario(client: hot.Client, _: Any) -> None:
        for path, more in bodies.items():
            short = path.removeprefix("/v1")
            for route in (path, short, f"{path}/", f"{short}/"):
                assert (await reply(client.post(route, {"model": "m", **more}))).status == 200, route

    play(scenario, Scripted(words("x")))


def test_tokens_of_a_conversation_are_counted(definitions: Path) -> None:
    """The engine gets the conversation and, for one that cannot make a prompt of it, its texts."""
    body = {"model": "m", "system": "Be brief.", "messages": [USER]}
    path = "/v1/messages/count_tokens"
    answer, engine = one(body, (), path)
    assert answer.body == {"input_tokens": len("Be brief.\nhello there")}
    (options,) = engine.asked
    assert options.UseTokenizerTemplate
    assert [said.role for said in options.Messages] == ["system", "user"]
    template = (
        "template: {jinja_template: true, chat: '{% for one in messages %}{{ one.role }} {% endfor %}'}\n"
    )
    (definitions / "m.yaml").write_text(DEFINITION + template)

    async def until_it_is_read(client: hot.Client, _: Any) -> Any:
        counted = answer.body

        async def changed() -> bool:
            nonlocal counted
            counted = (await reply(client.post(path, body))).body
            return bool(counted != answer.body)

        await until(changed)
        return counted

    assert play(until_it_is_read, Scripted()) == {"input_tokens": len("system user ")}


@pytest.mark.rule("http-6b")
def test_embeddings_of_ollama() -> None:
    async def scenario(client: hot.Client, _: Any) -> None:
        many = await reply(client.post("/api/embed", {"model": "m", "input": ["a", "b"], "truncate": True}))
        assert (many.status, many.body["embeddings"]) == (200, [[0.0, 1.0]] * 2)
        assert (many.body["prompt_eval_count"], many.body["model"]) == (6, "m")
        single = await reply(client.post("/api/embed", {"model": "m", "input": "a", "dimensions": 2}))
        assert single.body["embeddings"] == [[0.0, 1.0]]
        older = await reply(client.post("/api/embeddings", {"model": "m", "prompt": "a"}))
        assert older.body == {"embedding": [0.0, 1.0]}
        for body in ({"model": "m", "input": ""}, {"model": "m", "input": "a", "dimensions": 3}):
            refused = await reply(client.post("/api/embed", body))
            assert (refused.status, set(refused.body)) == (400, {"error"})
        refused = await reply(client.post("/api/embeddings", {"model": "m", "prompt": ""}))
        assert "prompt" in refused.body["error"]

    play(scenario, Scripted())


def test_what_ollamas_clients_ask_about_models(definitions: Path) -> None:
    more = "name: cold\nbackend: scripted\nembeddings: true\nparameters: {model: cold.gguf}\n"
    (definitions / "cold.yaml").write_text(more)

    async def scenario(client: hot.Client, _: Any) -> None:
        listed = (await reply(client.request("GET", "/api/tags"))).body["models"]
        assert [one["name"] for one in listed] == ["cold", "m"]
        assert listed[0]["details"]["family"] == "scripted"
        running = (await reply(client.request("GET", "/api/ps"))).body["models"]
        assert [one["name"] for one in running] == ["m"]
        shown = (await reply(client.post("/api/show", {"model": "cold"}))).body
        assert shown["capabilities"] == ["embedding"]
        older = (await reply(client.post("/api/show", {"name": "m"}))).body
        assert older["capabilities"] == ["completion"], "its template is not known to have tools"
        for body in ({"model": "none"}, {}):
            assert (await reply(client.post("/api/show", body))).status == 404
        assert (await reply(client.request("GET", "/api/version"))).body["version"].count(".") == 2
        stranger = hot.Client(application, None)
        for path in ("/api/tags", "/api/ps", "/api/version"):
            assert (await reply(stranger.request("GET", path))).status == 401
        models = (await reply(client.request("GET", "/v1/models"))).body["data"]
        times = {one["id"]: one["created"] for one in models}
        assert times["m"] == int((definitions / "m.yaml").stat().st_mtime)

    play(scenario, Scripted())


@pytest.mark.rule("http-6b")
def test_ollamas_default_tag_is_no_part_of_a_models_name() -> None:
    tagged = {"model": "m:latest"}

    async def scenario(client: hot.Client, _: Any) -> None:
        for path, body in {
            OLLAMA: BODIES[OLLAMA],
            GENERATE: BODIES[GENERATE],
            "/api/embed": {"input": "a"},
            "/api/embeddings": {"prompt": "a"},
            "/api/show": {},
        }.items():
            answer = await reply(client.post(path, body | tagged))
            assert answer.status == 200, path
            assert answer.body.get("model", "m:latest") == "m:latest", "as the client calls it"
        assert (await reply(client.post(OLLAMA, BODIES[OLLAMA] | {"model": "m:other"}))).status == 404

    play(scenario, Scripted(words("One two")))


@pytest.mark.rule("http-6b")
def test_a_model_may_have_ollamas_default_tag_in_its_name(definitions: Path) -> None:
    (definitions / "tagged.yaml").write_text(DEFINITION.replace("name: m", "name: n:latest"))

    async def scenario(client: hot.Client, _: Any) -> None:
        assert (await reply(client.post("/api/show", {"model": "n:latest"}))).status == 200
        assert (await reply(client.post("/api/show", {"model": "n"}))).status == 404

    play(scenario, Scripted())


def test_a_schema_that_no_grammar_holds_names_the_clients_field() -> None:
    schema = {"allOf": [{"anyOf": [{"minLength": one} for one in range(4)]}] * 10}
    changes: dict[str, Any] = {
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        OLLAMA: {"format": schema},
    }
    for path, change in changes.items():
        answer, _ = one(BODIES[path] | change, words("no"), path)
        (field,) = change
        assert answer.status == 400
        named = answer.body["error"]["param"] if path == RESPONSES else message_of(path, answer.body)
        assert named.startswith(field)
        assert "response_format" not in str(answer.body)


def test_log_probabilities_that_no_engine_tells_are_the_clients_include() -> None:
    asked = BODIES[RESPONSES] | {"include": ["message.output_text.logprobs"]}
    answer, _ = one(asked, words("One two"), RESPONSES)
    assert (answer.status, answer.body["error"]["param"]) == (400, "include")


def test_a_refusal_of_an_engine_names_the_clients_field() -> None:
    """In the client's dialect, not in OpenAI's."""
    schema = {"type": "object"}
    changes: dict[str, dict[str, Any]] = {
        MESSAGES: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        RESPONSES: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        OLLAMA: {"format": schema},
    }
    for path, change in changes.items():
        refusal = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "Grammar: no")
        answer, _ = one(BODIES[path] | change, [refusal], path)
        (field,) = change
        assert answer.status == 400
        named = answer.body["error"]["param"] if path == RESPONSES else message_of(path, answer.body)
        assert named.startswith(field)
