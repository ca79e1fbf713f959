"""A key that is not confirmed causes little work; a wrong one is counted, however its request ends."""

from pathlib import Path
from typing import Any

import pytest

from localai_cluster.accounts.principals import KEY_PREFIX, hash_secret
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from localai_cluster.web.throttle import WINDOW, Failures
from nodes.gateway import gbnf, generate, templates
from tests.support import hot
from tests.support.answering import ASK, CHAT, DEFINITION, definitions, play, reply
from tests.support.scripted import Scripted, words

__all__ = ["definitions"]
pytestmark = pytest.mark.django_db(transaction=True)

HERE = "192.0.2.7"
"""Where the hot path's test client calls from."""
RIGHT, WRONG = KEY_PREFIX + "a" * 48, KEY_PREFIX + "f" * 48
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TOKENS = "/v1/messages/count_tokens"


def template(source: str) -> str:
    """The definition of `m` with this chat template."""
    return DEFINITION + f"template: {{jinja_template: true, chat: '{source}'}}\n"


def failures(failed_keys: Failures) -> int:
    """The failures of this address; two minutes at most share them."""
    minute = int(clock.now().timestamp()) // WINDOW
    return sum(failed_keys._count(HERE, one) for one in (minute - 1, minute))


def refuse(path: str, body: Any) -> hot.Reply:
    """The reply to a request with a key that does not exist."""
    client = hot.Client(application, key=WRONG)
    answer: hot.Reply = play(lambda *_: reply(client.post(path, body)))
    return answer


@pytest.mark.rule("http-0.2")
def test_a_wrong_key_is_counted_when_its_request_fails(
    failed_keys: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """401 in place of the failure, which is for callers with a right key."""

    async def broken(*_: Any) -> Any:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(generate, "find_model", broken)
    assert refuse(CHAT, ASK).status == 401
    assert failures(failed_keys) == 1


@pytest.mark.rule("http-0.2")
def test_a_wrong_key_is_counted_when_the_template_is_unusable(
    definitions: Path, failed_keys: Failures
) -> None:
    (definitions / "m.yaml").write_text(template("{{ 1 // 0 }}"))
    answer = refuse(CHAT, ASK)
    assert (answer.status, "template" in answer.body["error"]["message"]) == (401, False)
    assert failures(failed_keys) == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, ASK), (CHAT, ASK | {"response_format": SCHEMA}), (TOKENS, ASK)],
    ids=["chat", "schema", "tokens"],
)
def test_nothing_is_rendered_or_compiled_for_a_wrong_key(
    path: str, body: Any, definitions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    async def render(*_: Any) -> str:
        called.append("render")
        return ""

    monkeypatch.setattr(templates, "render", render)
    monkeypatch.setattr(gbnf, "from_schema", lambda *_: called.append("compile"))
    if "response_format" not in body:
        (definitions / "m.yaml").write_text(template("{{ messages }}"))
    assert refuse(path, body).status == 401
    assert not called


@pytest.mark.rule("R2.7")
def test_the_key_of_such_a_request_costs_a_statement_once(definitions: Path) -> None:
    """The first request of a key that this process does not know has two statements, the others have one."""
    (definitions / "m.yaml").write_text(template("{{ messages }}"))

    async def scenario(_admin: hot.Client, picker: hot.CountedPicker) -> list[int]:
        await hot.in_thread(lambda: hot.api_key(hash_secret(RIGHT)))
        client = hot.Client(application, key=RIGHT)
        costs = []
        for _ in range(3):
            await picker.settle()  # so that no release is left over
            before = picker.connection.executed
            answer = await reply(client.post(CHAT, ASK | {"response_format": SCHEMA}))
            assert answer.status == 200
            costs.append(picker.connection.executed - before)
        return costs

    assert play(scenario, Scripted(words("x"))) == [2, 1, 1]
