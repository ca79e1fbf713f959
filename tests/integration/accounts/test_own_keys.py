"""A person's own API keys: `/api/auth/api-keys`."""

import threading
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test.utils import CaptureQueriesContext

from localai_cluster.accounts import api_keys, principals
from localai_cluster.accounts.models import ApiKey, AuditEntry, InitialPassword
from localai_cluster.kit import clock, errors
from tests.integration.accounts.test_session import PASSWORD, Browser
from tests.support import api, pages

pytestmark = pytest.mark.django_db
OWN = "/api/auth/api-keys"


@pytest.fixture
def ann() -> Any:
    """A person who is no administrator."""
    return get_user_model().objects.create_user("ann", password=PASSWORD)


@pytest.fixture
def browser(ann: Any) -> Browser:
    """Her browser."""
    page = Browser()
    assert page.sign_in().status_code == 200
    return page


def delete(browser: Browser, key: str) -> Any:
    token = browser.client.cookies["csrftoken"].value
    return browser.client.delete(f"{OWN}/{key}", headers={"X-CSRFToken": token})


def lists_models(key: str) -> int:
    answer = api.Caller(Authorization=f"Bearer {key}").get("/api/models/capabilities")
    return int(answer.status_code)


def test_a_key_is_shown_once_used_and_revoked(browser: Browser) -> None:
    created = browser.post(OWN, {"name": " notebook "})
    body = created.json()
    assert (created.status_code, body["name"], body["role"]) == (201, "notebook", "user")
    assert body["key"].startswith(body["keyPrefix"])
    listed = browser.get(OWN).json()["keys"]
    assert listed == [{name: value for name, value in body.items() if name != "key"}]
    assert lists_models(body["key"]) == 200
    assert delete(browser, body["id"]).json() == {"message": "API key revoked"}
    assert (browser.get(OWN).json(), lists_models(body["key"])) == ({"keys": []}, 401)
    assert delete(browser, body["id"]).status_code == 200, "a repeated request changes nothing"
    entries = AuditEntry.objects.order_by("id").values_list("kind", "actor", "subject_id")
    assert list(entries) == [(f"user.key_{did}", "ann", body["id"]) for did in ("created", "revoked")]


def test_nobody_sees_or_revokes_the_keys_of_others(browser: Browser) -> None:
    other = get_user_model().objects.create_user("bob", password=PASSWORD)
    row, key = principals.create_api_key(other, "bob's")
    assert browser.get(OWN).json() == {"keys": []}
    for identifier in (str(row.pk), "0", "x", "9" * 30, "%00"):
        assert delete(browser, identifier).status_code == 404, identifier
    assert lists_models(key) == 200


@pytest.mark.parametrize("name", ["", "  ", "a\x00b", "x" * 101, 7, None])
def test_a_name_is_required(browser: Browser, name: Any) -> None:
    answer = browser.post(OWN, {"name": name})
    assert (answer.status_code, answer.json()["field"], ApiKey.objects.count()) == (400, "name", 0)


def test_a_key_manages_no_keys(ann: Any) -> None:
    """Otherwise it could leave behind keys that outlive its revocation."""
    _, key = principals.create_api_key(ann, "first")
    caller = api.Caller(Authorization=f"Bearer {key}")
    assert [caller.get(OWN).status_code, caller.post(OWN, {"name": "x"}).status_code] == [401, 401]
    page = Browser()
    page.get("/api/auth/status")
    assert page.post("/api/auth/token-login", {"token": key}).status_code == 200
    assert [page.get(OWN).status_code, page.post(OWN, {"name": "x"}).status_code] == [403, 403]
    assert ApiKey.objects.count() == 1


def test_only_a_page_of_this_origin_and_a_chosen_password_may(browser: Browser, ann: Any) -> None:
    assert browser.client.post(OWN, {"name": "x"}, "application/json").status_code == 403
    InitialPassword.objects.create(user=ann)
    assert (browser.get(OWN).status_code, Browser().get(OWN).status_code) == (403, 401)


def test_the_number_of_keys_is_limited_and_the_list_costs_one_query(browser: Browser, ann: Any) -> None:
    for number in range(api_keys.MAX_KEYS_PER_USER):
        principals.create_api_key(ann, str(number))
    answer = browser.post(OWN, {"name": "one more"})
    assert (answer.status_code, ApiKey.objects.count()) == (409, api_keys.MAX_KEYS_PER_USER)
    with CaptureQueriesContext(connection) as queries:
        assert len(browser.get(OWN).json()["keys"]) == api_keys.MAX_KEYS_PER_USER
    assert len([query for query in queries if "api_keys" in query["sql"]]) == 1
    api_keys.revoke_key(ann.pk, ApiKey.objects.latest("pk").pk, now=clock.now())
    assert browser.post(OWN, {"name": "one more"}).status_code == 201


@pytest.mark.django_db(transaction=True)
def test_two_requests_at_once_do_not_pass_the_limit(ann: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "MAX_KEYS_PER_USER", 1)
    refused: list[bool] = []

    def create() -> None:
        try:
            api_keys.create_key(ann, "x")
        except errors.Conflict:
            refused.append(True)
        finally:
            connection.close()

    threads = [threading.Thread(target=create) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(refused), ApiKey.objects.count()) == (3, 1)


def test_the_admin_revokes_keys_for_good(ann: Any) -> None:
    """An administrator who had opened the key's page before and saved it made the key valid again."""
    row, key = principals.create_api_key(ann, "notebook")
    at = "/admin/accounts/apikey/"
    root = pages.superuser()
    before = root.get(f"{at}{row.pk}/change/")
    pages.select(root, "revoke", row.pk, at=at)
    row.refresh_from_db()
    assert (row.revoked_at is None, lists_models(key)) == (False, 401)
    pages.select(root, "revoke", row.pk, at=at)
    pages.confirm(root, before, name="laptop")
    stored = ApiKey.objects.get()
    assert (stored.name, stored.revoked_at) == ("laptop", row.revoked_at)
    entries = AuditEntry.objects.filter(kind="user.key_revoked").values_list("actor", "subject_id")
    assert list(entries) == [("root", str(row.pk))]


def test_the_admin_shows_a_new_key_only_in_its_answer(ann: Any) -> None:
    """Only its hash is kept. After a redirect it was in a cookie, which is signed and not encrypted."""
    root = pages.superuser()
    page = pages.confirm(root, root.get("/admin/accounts/apikey/add/"), user=str(ann.pk), name="ci")
    (shown,) = pages.messages(page)
    key = shown.rpartition(" ")[2]
    assert (page.redirect_chain, lists_models(key), key in page.content.decode()) == ([], 200, True)
    assert "messages" not in root.cookies
    assert key not in root.get(f"/admin/accounts/apikey/{ApiKey.objects.get().pk}/change/").content.decode()
