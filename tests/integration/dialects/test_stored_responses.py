"""The store of `/v1/responses` (review C5, D-STATELESS): off by default, a store for each API key."""

import asyncio
import dataclasses
import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import grpc
import psycopg
import pytest
from django.contrib.auth import get_user_model
from pytest_django import Settings

from localai_cluster.accounts.principals import create_api_key, hash_secret
from localai_cluster.asgi import application
from localai_cluster.kit import clock, conf, database_pool
from localai_cluster.rpc.messages import PredictOptions
from nodes.dialects import stored_responses
from nodes.models import StoredResponse
from nodes.reconcilers import tasks
from tests.support import hot
from tests.support.answering import CHAT, definitions, finished, play, reply
from tests.support.environment import API_KEY
from tests.support.scripted import Refusal, Scripted, Step, call, words

__all__ = ["definitions"]
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.rule("http-6a")]

URL = "/v1/responses"
HOUR = 3600.0
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ASK: dict[str, Any] = {"model": "m", "input": "one"}
KEPT = {"store": True}


class Recalling(Scripted):
    """Answers a question with a call if it has tools, all else with words."""

    @property
    def conversations(self) -> list[list[tuple[str, str]]]:
        """The roles and texts of the messages of each call."""
        return [[(message.role, message.content) for message in request.Messages] for request in self.asked]

    def script_for(self, request: PredictOptions) -> Iterable[Step]:
        if request.Tools and request.Messages[-1].role != "tool":
            return call(0, "weather", "{}", id="call_1")
        return words("Hello you")


class Counter:
    """Counts the statements of the shared pool."""

    def __init__(self) -> None:
        self.statements = 0
        pool = database_pool.shared()
        for name in ("fetch_rows", "run", "run_in_transaction"):
            setattr(pool, name, self._counting(getattr(pool, name)))

    def _counting(self, inner: Any) -> Any:
        async def counted(*arguments: Any) -> Any:
            self.statements += 1
            return await inner(*arguments)

        return counted


@pytest.fixture
def store(settings: Settings) -> None:
    """Responses are stored for an hour."""
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, response_retention=HOUR)


def change(settings: Settings, **values: Any) -> None:
    settings.CLUSTER = dataclasses.replace(settings.CLUSTER, **values)


async def made(client: hot.Client, **fields: Any) -> Any:
    """The body of a response that must come."""
    answer = await reply(client.post(URL, ASK | fields))
    assert answer.status == 200, answer.body
    return answer.body


async def shown(client: hot.Client, identity: str, method: str = "GET", **more: Any) -> hot.Reply:
    return await reply(client.request(method, f"{URL}/{identity}", **more))


async def refused(client: hot.Client, **fields: Any) -> tuple[int, Mapping[str, Any]]:
    answer = await reply(client.post(URL, ASK | fields))
    return answer.status, answer.body["error"]


def test_nothing_is_stored_by_default() -> None:
    """C5: `store` is answered with false, and there is nothing to refer to."""
    assert conf.load({})[0].response_retention == 0

    async def scenario(client: hot.Client, _: Any) -> None:
        counter = Counter()
        body = await made(client, store=True)
        assert (body["store"], body["previous_response_id"]) == (False, None)
        for method in ("GET", "DELETE"):
            answer = await shown(client, body["id"], method)
            assert (answer.status, answer.body["error"]["code"]) == (404, "not_found")
            assert "stores no responses" in answer.body["error"]["message"]
        status, error = await refused(client, previous_response_id=body["id"])
        assert (status, error["param"], error["code"]) == (
            400,
            "previous_response_id",
            "unsupported_parameter",
        )
        assert counter.statements == 0

    play(scenario, Recalling())
    assert not StoredResponse.objects.exists()


def test_a_conversation_goes_on_from_a_stored_response(store: None) -> None:
    """C5: as in OpenAI's API without its instructions, whole and streamed; shown and deleted by its id."""
    engine = Recalling()

    async def scenario(client: hot.Client, _: Any) -> None:
        first = await made(client, instructions="Be brief.", metadata={"a": "b"})
        assert first["store"] is True, "unless the request says otherwise"
        assert first["id"].startswith("resp_")
        answer = await shown(client, first["id"])
        assert (answer.status, answer.body) == (200, first)
        assert (await shown(client, first["id"], headers={"accept": "*/*"})).body == first
        streamed = await finished(
            ASK | {"input": "two", "previous_response_id": first["id"], "stream": True}, URL
        )
        events = [
            json.loads(line[6:]) for line in streamed.taken.decode().splitlines() if line.startswith("data: ")
        ]
        second = events[-1]["response"]
        assert (second["store"], second["previous_response_id"]) == (True, first["id"])
        assert events[0]["response"]["id"] == second["id"]
        assert (await shown(client, second["id"])).body == second
        await made(client, input=[{"role": "user", "content": "three"}], previous_response_id=second["id"])
        said = ("assistant", "Hello you")
        assert engine.conversations == [
            [("system", "Be brief."), ("user", "one")],
            [("user", "one"), said, ("user", "two")],
            [("user", "one"), said, ("user", "two"), said, ("user", "three")],
        ]
        deleted = await shown(client, first["id"], "DELETE")
        assert deleted.body == {"id": first["id"], "object": "response", "deleted": True}
        assert {(await shown(client, first["id"], method)).status for method in ("GET", "DELETE")} == {404}
        for previous, text in ((first["id"], "not found"), (second["id"], "is no longer stored")):
            status, error = await refused(client, previous_response_id=previous)
            assert (status, error["code"]) == (400, "previous_response_not_found")
            assert (error["param"], text in error["message"]) == ("previous_response_id", True)
        assert (await shown(client, second["id"])).status == 200
        assert (await shown(client, second["id"], "PUT")).headers["allow"] == "GET, DELETE"

    play(scenario, engine)


def test_items_of_stored_responses_can_be_referred_to(store: None) -> None:
    """C5: the second turn of the Vercel AI SDK; what is stored of it has no references."""
    engine = Recalling()

    async def scenario(client: hot.Client, _: Any) -> None:
        user = {"role": "user", "content": "one"}
        first = await made(client, input=[user], tools=[TOOL])
        (item,) = first["output"]
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "sun"}
        turn = [user, {"type": "item_reference", "id": item["id"]}, output]
        second = await made(client, input=turn, tools=[TOOL])
        await shown(client, first["id"], "DELETE")
        await made(client, input="two", previous_response_id=second["id"])
        status, error = await refused(client, input=turn)
        assert (status, error["message"]) == (400, f"input[1]: {item['id']}: no stored item has this id")

    play(scenario, engine)
    roles = [[role for role, _ in asked] for asked in engine.conversations]
    assert roles == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "assistant", "user"],
    ]


UNREAD_ITEMS: list[dict[str, Any]] = [
    {"type": "tool_search_call", "arguments": {"query": "x"}},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x"}]},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
]
"""Items that only OpenAI can read. Their fields have the names of our fields and other types."""


@pytest.mark.parametrize("item", UNREAD_ITEMS, ids=lambda item: item["type"])
def test_a_conversation_goes_on_after_an_item_that_was_left_out(store: None, item: dict[str, Any]) -> None:
    """C2, C5: what is left out of a request is left out of the conversation that continues it."""
    engine = Recalling()

    async def scenario(client: hot.Client, _: Any) -> None:
        first = await made(client, input=[item, {"role": "user", "content": "one"}])
        await made(client, input="two", previous_response_id=first["id"])

    play(scenario, engine)
    assert engine.conversations[-1] == [("user", "one"), ("assistant", "Hello you"), ("user", "two")]


def test_no_stored_response_has_an_id_with_nul(store: None) -> None:
    """PostgreSQL rejects NUL: such an id is not found, wherever a request has it."""

    async def scenario(client: hot.Client, _: Any) -> None:
        for previous in ("\0", "resp_a\0"):
            status, error = await refused(client, previous_response_id=previous)
            assert (status, error["code"]) == (400, "previous_response_not_found")
        status, error = await refused(client, input=[{"type": "item_reference", "id": "msg_a\0_0"}])
        assert (status, error["param"]) == (400, "input")
        for method in ("GET", "DELETE"):
            assert (await shown(client, "resp_a\0", method)).status == 404

    play(scenario, Recalling())


def test_each_key_has_a_store_of_its_own(store: None) -> None:
    """C5: another key of the same user finds nothing; a session and an open network have no store."""
    user = get_user_model().objects.create_user("ann")
    keys = [API_KEY, *(create_api_key(user, name)[1] for name in "ab")]

    async def scenario(_: hot.Client, __: Any) -> None:
        clients = [hot.Client(application, key=key) for key in keys]
        responses = [await made(client) for client in clients]
        for client, own in zip(clients, responses, strict=True):
            for response in responses:
                is_own = response is own
                assert (await shown(client, response["id"])).status == (200 if is_own else 404)
                answer = await reply(client.post(URL, ASK | {"previous_response_id": response["id"]}))
                assert answer.status == (200 if is_own else 400)
            other = next(response for response in responses if response is not own)
            assert (await shown(client, other["id"], "DELETE")).status == 404
        wrong = hot.Client(application, key="lac-wrong")
        assert (await shown(wrong, responses[1]["id"])).status == 401
        assert (await reply(wrong.post(URL, ASK | {"previous_response_id": "resp_1"}))).status == 401

    play(scenario, Recalling())
    assert StoredResponse.objects.values("owner").distinct().count() == len(keys)


def test_a_caller_without_a_key_has_no_store(store: None, settings: Settings) -> None:
    change(settings, keyless_networks=(ip_network("192.0.2.0/24"),))

    async def scenario(_: hot.Client, __: Any) -> None:
        client = hot.Client(application, key=None)
        body = await made(client, store=True)
        assert body["store"] is False
        assert (await shown(client, body["id"])).status == 404

    play(scenario, Recalling())
    assert not StoredResponse.objects.exists()


def test_requests_that_do_not_use_the_store_cost_no_statement(store: None) -> None:
    """C5: one for a reference, one transaction for a stored response."""

    async def scenario(client: hot.Client, _: Any) -> None:
        counter = Counter()
        await made(client, store=False)
        await reply(client.post(CHAT, {"model": "m", "messages": [{"role": "user", "content": "x"}]}))
        assert counter.statements == 0
        first = await made(client)
        assert counter.statements == 1
        await made(client, store=False, previous_response_id=first["id"])
        assert counter.statements == 2

    play(scenario, Recalling())


def test_what_is_not_complete_is_not_stored(store: None) -> None:
    """A stream that breaks off, and one whose client leaves."""

    async def scenario(client: hot.Client, _: Any) -> None:
        streamed = await finished(ASK | {"stream": True}, URL)
        assert b"response.failed" in streamed.taken

    play(scenario, Scripted([*words("Half"), Refusal(grpc.StatusCode.INTERNAL, "no")]))
    assert not StoredResponse.objects.exists()


def test_the_bytes_of_a_key_are_bounded(store: None, settings: Settings) -> None:
    """C5: the least recently used go; what is too large alone is not stored, and the response says so."""
    change(settings, response_storage_limit=20_000)

    async def scenario(client: hot.Client, _: Any) -> None:
        other = await made(hot.Client(application, key=create_key))
        first = await made(client, input="x" * 4000)
        responses = [await made(client, input="x" * 4000) for _ in range(4)]
        assert (await shown(client, first["id"])).status == 404
        assert (await shown(client, responses[-1]["id"])).status == 200
        large = await made(client, input="x" * 20_000)
        assert large["store"] is False
        assert (await shown(client, large["id"])).status == 404
        assert (await shown(hot.Client(application, key=create_key), other["id"])).status == 200

    create_key = create_api_key(get_user_model().objects.create_user("ann"), "k")[1]
    play(scenario, Recalling())
    rows = StoredResponse.objects.filter(owner=hash_secret(API_KEY))
    assert 10_000 < sum(row.size for row in rows) <= 20_000


def test_the_number_of_a_keys_responses_is_bounded(store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES_PER_KEY", 2)

    async def scenario(client: hot.Client, _: Any) -> None:
        for _ in range(4):
            await made(client)

    play(scenario, Recalling())
    assert StoredResponse.objects.count() == 2


def test_a_conversation_is_bounded(store: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """C5: in bytes and in responses, before its contents are read."""

    async def scenario(client: hot.Client, _: Any) -> None:
        first = await made(client, input="x" * 3000)
        second = await made(client, input="y" * 3000, previous_response_id=first["id"])
        for name, value in (("MAX_BODY_BYTES", 6000), ("MAX_CHAIN_LENGTH", 1)):
            with monkeypatch.context() as patched:
                patched.setattr(stored_responses, name, value)
                _, error = await refused(client, previous_response_id=second["id"])
                assert "too long" in error["message"], name
        await made(client, previous_response_id=second["id"])

    play(scenario, Recalling())


def test_what_is_unused_for_its_retention_goes(store: None, settings: Settings) -> None:
    """C5: it is not found any more, and the hourly cleaning removes it; a used conversation stays."""

    def age(hours: float) -> None:
        StoredResponse.objects.update(used_at=clock.now() - timedelta(hours=hours))

    async def scenario(client: hot.Client, _: Any) -> None:
        first = await made(client)
        second = await made(client, previous_response_id=first["id"])
        await hot.in_thread(age, 0.9)
        third = await made(client, previous_response_id=second["id"])
        await hot.in_thread(tasks.prune_timeline)
        assert (await shown(client, first["id"])).status == 200
        await hot.in_thread(age, 1.1)
        assert (await shown(client, third["id"])).status == 404
        assert (await refused(client, previous_response_id=third["id"]))[0] == 400
        await hot.in_thread(tasks.prune_timeline)

    play(scenario, Recalling())
    assert not StoredResponse.objects.exists()


def test_the_responses_of_a_revoked_key_go_and_all_if_the_store_is_switched_off(
    store: None, settings: Settings
) -> None:
    row, key = create_api_key(get_user_model().objects.create_user("ann"), "k")

    async def scenario(client: hot.Client, _: Any) -> None:
        await made(client)
        await made(hot.Client(application, key=key))

    play(scenario, Recalling())
    row.revoked_at = clock.now()
    row.save()
    tasks.prune_timeline()
    assert StoredResponse.objects.exclude(owner=row.key_hash).count() == StoredResponse.objects.count() == 1
    change(settings, response_retention=0.0)
    tasks.prune_timeline()
    assert not StoredResponse.objects.exists()


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_stored_is_not_lost(
    store: None, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """It says that it is not stored; a reference that cannot be read is a 503."""

    async def unreachable(*_: Any) -> Any:
        raise psycopg.OperationalError("gone")

    async def scenario(client: hot.Client, _: Any) -> None:
        # The picker uses the same pool when it stops.
        with monkeypatch.context() as patched:
            patched.setattr(database_pool.shared(), "run_in_transaction", unreachable)
            patched.setattr(database_pool.shared(), "fetch_rows", unreachable)
            if stream:
                streamed = await finished(ASK | {"stream": True}, URL)
                last = json.loads(streamed.taken.decode().strip().rpartition("data: ")[2])
                assert (last["type"], last["response"]["store"]) == ("response.completed", False)
            else:
                assert (await made(client))["store"] is False
            assert (await refused(client, previous_response_id="resp_1"))[0] == 503

    play(scenario, Recalling())


def test_a_response_whose_statement_is_refused_is_not_lost(
    store: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the database says of it, the answer is there."""
    monkeypatch.setattr(stored_responses, "_ADD_SQL", "SELECT nothing")

    async def scenario(client: hot.Client, _: Any) -> Any:
        return (await made(client))["store"]

    assert play(scenario, Recalling()) is False


def test_conversations_of_a_key_run_side_by_side(store: None, settings: Settings) -> None:
    """Branches of one conversation, with deletions and evictions: no deadlock, no error."""
    change(settings, response_storage_limit=8_000, response_retention=0.5)

    async def scenario(client: hot.Client, _: Any) -> None:
        first = await made(client, input="x" * 1000)

        async def branch(number: int) -> None:
            previous = first["id"]
            for _ in range(4):
                answer = await reply(client.post(URL, ASK | {"previous_response_id": previous}))
                if answer.status == 400:
                    assert answer.body["error"]["code"] == "previous_response_not_found"
                    return
                assert (answer.status, answer.body["store"]) == (200, True)
                previous = answer.body["id"] if number % 2 else previous

        await asyncio.gather(*map(branch, range(8)))

    play(scenario, Recalling())
