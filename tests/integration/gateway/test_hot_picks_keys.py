"""API keys on the hot path: which are served, and whose they are."""

import asyncio
from typing import Any

import pytest
from django.contrib.auth.models import User

from localai_cluster.accounts import principals
from localai_cluster.accounts.principals import ANONYMOUS, StoredKey, WrongKey
from localai_cluster.kit import clock
from nodes.gateway.request import InferenceRequest
from tests.support import hot

pytestmark = pytest.mark.django_db(transaction=True)


def test_only_valid_keys_are_served_and_counted() -> None:
    """A pick for an unknown, revoked or sleeping user's key counts nothing and is refused."""
    hot.replica(hot.node())
    hot.api_key("good", "a")
    hot.api_key("revoked", "b", revoked_at=clock.now())
    hot.api_key("asleep", "c", active=False)
    keys = ("good", "revoked", "asleep", "unknown", "good")
    requests = [InferenceRequest(model="echo", key_hash=key) for key in keys]
    without_model = InferenceRequest(key_hash="good")

    async def scenario() -> list[Any]:
        async with hot.picker() as picker:
            asked = [picker.acquire(request) for request in (*requests, without_model)]
            return await asyncio.gather(*asked, return_exceptions=True)

    good, *bad, again, nothing = asyncio.run(scenario())
    assert good == again == requests[0].replica
    assert nothing is None
    assert [type(error) for error in bad] == [WrongKey] * 3
    assert {request.principal.name for request in (requests[0], requests[4], without_model)} == {"a"}
    assert {request.principal for request in requests[1:4]} == {ANONYMOUS}
    assert hot.counts() == {"127.0.0.1:50000": 2}


def test_rest_and_the_hot_path_agree_on_every_stored_key() -> None:
    """One rule says which keys are valid and whose they are, by ORM and by the hot path's statement."""
    hot.api_key("user", "a")
    hot.api_key("staff", "b")
    hot.api_key("superuser", "c")
    hot.api_key("revoked", "d", revoked_at=clock.now())
    hot.api_key("asleep", "e", active=False)
    User.objects.filter(username="b").update(is_staff=True)
    User.objects.filter(username="c").update(is_superuser=True)
    requests = {
        key: InferenceRequest(key_hash=key) for key in ("user", "staff", "superuser", "revoked", "asleep")
    }

    async def scenario() -> None:
        async with hot.picker() as picker:
            asked = [picker.acquire(request) for request in requests.values()]
            await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(scenario())
    by_orm = {key: principals.owner_of(StoredKey(key)) for key in requests}
    assert {key: request.principal for key, request in requests.items()} == by_orm
    assert [who.kind for who in by_orm.values()] == ["user", "admin", "admin", "anonymous", "anonymous"]
