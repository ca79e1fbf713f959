"""Text through the edge: what definitions and requests each decide, and models as clients see them."""

from pathlib import Path
from typing import Any

import pytest

from localai_cluster.asgi import application
from operations.models import Operation
from tests.support import hot
from tests.support.answering import ASK, CHAT, COMPLETIONS, DEFINITION, definitions, one, play, reply
from tests.support.scripted import Scripted, words

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)


def test_the_template_of_a_definition(definitions: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (definitions / "m.yaml").write_text(
        DEFINITION + f"template:\n  jinja_template: true\n  chat: '{template}'\nstopwords: ['<user>']\n"
    )
    _, engine = one(ASK, words("x"))
    assert (engine.asked[0].Prompt, engine.asked[0].UseTokenizerTemplate) == ("<user>hello there", False)
    assert list(engine.asked[0].StopPrompts) == ["<user>"]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    parts = [{"type": "text", "text": "look"}, picture]
    _, engine = one(ASK | {"messages": [{"role": "user", "content": parts}]}, words("x"))
    assert (engine.asked[0].Prompt, list(engine.asked[0].Images)) == ("<user>look", ["aGk="])


def test_a_template_of_go_falls_back_to_the_models_own_with_a_warning(definitions: Path) -> None:
    (definitions / "m.yaml").write_text(DEFINITION + "template:\n  chat: '{{.Input}}'\n")
    engine = Scripted(words("x"))

    async def scenario(client: hot.Client, _: Any) -> Any:
        await reply(client.post(CHAT, ASK))
        return (await reply(client.request("GET", "/v1/models"))).body["data"]

    (listed,) = play(scenario, engine)
    assert engine.asked[0].UseTokenizerTemplate
    assert "Go's language" in listed["warnings"][0]


@pytest.mark.parametrize("name", ["m", "org/m", "a b"])
def test_one_model(name: str, definitions: Path) -> None:
    file = definitions / "other.yaml"
    file.write_text(DEFINITION.replace("name: m", f"name: {name}"))
    if name == "m":
        file = definitions / "m.yaml"
    path = f"/v1/models/{name}"
    answer = play(lambda client, _: reply(client.request("GET", path)), Scripted())
    told = {
        "id": name,
        "object": "model",
        "created": int(file.stat().st_mtime),
        "owned_by": "localai",
        "capabilities": ["FLAG_CHAT", "FLAG_COMPLETION", "FLAG_TOKENIZE"],
    }
    assert (answer.status, answer.body) == (200, told)


def test_a_model_that_is_not_defined_is_a_404() -> None:
    answer = play(lambda client, _: reply(client.request("GET", "/v1/models/m/x")), Scripted())
    assert (answer.status, answer.body["error"]["code"]) == (404, "model_not_found")


def test_a_model_is_told_to_callers_with_a_key() -> None:
    stranger = hot.Client(application, key=None)
    answer = play(lambda *_: reply(stranger.request("GET", "/v1/models/m")), Scripted())
    assert answer.status == 401


@pytest.mark.rule("A86")
@pytest.mark.rule("R1.94", "R2.2", "T-REG-117", "T-REG-118")
def test_parameters_of_requests_change_nothing_about_the_model() -> None:
    """A86: a hundred requests with varied parameters, one replica, a hundred answers."""

    async def scenario(client: hot.Client, _: Any) -> list[int]:
        asks = [
            client.post(path, body | {"max_tokens": number + 1, "temperature": number / 50, "seed": number})
            for number in range(50)
            for path, body in ((CHAT, ASK), (COMPLETIONS, {"model": "m", "prompt": "hello"}))
        ]
        return [(await reply(ask)).status for ask in asks]

    engine = Scripted(words("x"))
    assert play(scenario, engine) == [200] * 100
    assert len(hot.counts()) == 1
    assert not Operation.objects.exists()


def test_what_the_definition_says_counts_where_the_request_says_nothing(definitions: Path) -> None:
    (definitions / "m.yaml").write_text(
        "name: m\nbackend: x\nparameters: {model: m.gguf, temperature: 0.25, max_tokens: 9}\n"
    )
    _, engine = one(ASK | {"max_tokens": 3}, words("x"))
    assert (engine.asked[0].Temperature, engine.asked[0].Tokens) == (0.25, 3)
    assert (engine.asked[0].TopK, engine.asked[0].Seed > 0) == (40, True)
