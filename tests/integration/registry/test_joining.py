"""Join tokens: made, listed and revoked by admins, spent by new machines, and what they never do."""

import json
import re
from dataclasses import replace
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.test import Client

from localai_cluster.accounts.actors import Actor, ActorKind
from localai_cluster.accounts.models import AuditEntry
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import clock, errors
from nodes.models import BackendNode, JoinToken, NodeConflict, NodeEvent
from nodes.reconcilers import tasks
from nodes.registry import claims, joining, registration
from tests.support import api
from tests.support.environment import REGISTRATION_TOKEN
from tests.support.fleet import at_once, own_secret, unexpected

pytestmark = pytest.mark.django_db
ROOT = Actor(ActorKind.USER, "root")
TOKENS = "/api/join-tokens"


def allow(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Other cluster settings for one test."""
    monkeypatch.setattr(settings, "CLUSTER", replace(settings.CLUSTER, **changed))


def made(**wanted: Any) -> str:
    """A new join token."""
    return joining.make(actor=ROOT, now=clock.now(), **wanted)[1]


def row(token: str) -> JoinToken:
    return JoinToken.objects.get(token_hash=hash_secret(token))


def expire(token: str) -> None:
    JoinToken.objects.filter(pk=row(token).pk).update(expires_at=clock.now() - timedelta(seconds=1))


def revoke(token: str) -> None:
    joining.revoke(row(token).pk, actor=ROOT, now=clock.now())


def join(
    token: str, name: str = "w1", *, secret: str | None = None, body: str | None = None, **more: Any
) -> Any:
    """A worker registers with a join token in header and body."""
    secret = api.secret_of(name) if secret is None else secret
    headers = {"X-LocalAI-Node-Secret": secret} if secret else {}
    told = api.registration(name, **more) | {"token": token if body is None else body}
    return api.bearer(token).post(api.REGISTER, told, **headers)


# --- the API


def test_a_token_is_shown_once_and_stored_as_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, public_url="http://192.0.2.10:8080")
    answer = api.admin().post(TOKENS, {"note": "rack 4", "uses": 3, "lifetime_seconds": 600})
    told = answer.json()
    assert answer.status_code == 201
    assert answer["Cache-Control"] == "private, no-store"
    assert re.fullmatch("join-[0-9a-f]{64}", told["token"])
    assert told["command"].startswith(f"T={told['token']}; ")
    assert (told["url"], told["url_is_set"]) == ("http://192.0.2.10:8080", True)
    stored = JoinToken.objects.get()
    assert stored.token_hash == hash_secret(told["token"])
    assert (stored.note, stored.max_uses, stored.created_by) == ("rack 4", 3, "static-key")
    assert stored.expires_at - stored.created_at == timedelta(minutes=10)
    (listed,) = api.admin().get(TOKENS).json()
    assert (listed["state"], listed["uses"], listed["max_uses"]) == ("usable", 0, 3)
    assert told["token"] not in json.dumps(listed)
    assert stored.token_hash not in json.dumps(listed)


@pytest.mark.parametrize(
    ("settings", "sent", "told"),
    [
        ({"host": "127.0.0.1"}, {"url": "http://127.0.0.1:8080"}, ["make package", "HOST=0.0.0.0 make run"]),
        ({"host": "0.0.0.0"}, {"url": "http://[::1]:8080"}, ["make package", "set CLUSTER_PUBLIC_URL"]),
        ({"public_url": "http://192.0.2.10:8080"}, {}, ["make package", "plain HTTP"]),
        ({"public_url": "https://ai.example"}, {}, ["make package"]),
    ],
    ids=["this machine only", "opened by loopback", "HTTP", "HTTPS"],
)
def test_what_keeps_the_line_from_working_comes_with_it(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, str],
    sent: dict[str, str],
    told: list[str],
) -> None:
    """Review R16 and X6: reported with the line, not by the machine that runs it; what helps is named."""
    allow(monkeypatch, wheel_dir=tmp_path, **settings)
    warnings = api.admin().post(TOKENS, sent).json()["warnings"]
    assert len(warnings) == len(told), warnings
    assert all(words in warning for words, warning in zip(told, warnings, strict=True)), warnings


def test_defaults_are_one_hour_and_one_use() -> None:
    told = api.admin().post(TOKENS, {}).json()
    stored = JoinToken.objects.get()
    assert (stored.max_uses, stored.expires_at - stored.created_at) == (1, timedelta(hours=1))
    assert (told["url"], told["url_is_set"]) == ("http://testserver", False)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lifetime_seconds": 59}, "lifetime_seconds"),
        ({"lifetime_seconds": 7 * 86400 + 1}, "lifetime_seconds"),
        ({"lifetime_seconds": "3600"}, "lifetime_seconds"),
        ({"uses": 0}, "uses"),
        ({"uses": 1001}, "uses"),
        ({"uses": True}, "uses"),
        ({"note": "n" * 201}, "note"),
        ({"note": "a\u202eb"}, "note"),
        ({"note": 7}, "note"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://u:p@h"}, "url"),
        ({"url": "http://h'; rm -rf ~; '"}, "url"),
    ],
)
def test_bad_input_is_a_400_that_names_the_field(body: dict[str, Any], field: str) -> None:
    answer = api.admin().post(TOKENS, body)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), answer.content
    assert not JoinToken.objects.exists()


def test_only_admins_and_only_with_the_csrf_token() -> None:
    user = get_user_model().objects.create_superuser("root", password="x")
    browser = Client(enforce_csrf_checks=True)
    browser.force_login(user)
    assert browser.get(TOKENS).status_code == 200
    assert browser.post(TOKENS, "{}", content_type="application/json").status_code == 403
    for who in (api.Caller(), api.bearer("wrong"), api.bearer(REGISTRATION_TOKEN), api.bearer(made())):
        assert who.get(TOKENS).status_code == 401
        assert who.post(TOKENS, {}).status_code == 401
        assert who.delete(f"{TOKENS}/{uuid4()}").status_code == 401


def test_the_list_costs_the_same_for_one_and_for_fifty(django_assert_num_queries: Any) -> None:
    made()
    with django_assert_num_queries(2):
        api.admin().get(TOKENS)
    for _ in range(49):
        made()
    with django_assert_num_queries(2):
        assert len(api.admin().get(TOKENS).json()) == 50


def test_revoking_twice_changes_nothing_and_an_unknown_one_is_404() -> None:
    token = row(made())
    for _ in range(2):
        assert api.admin().delete(f"{TOKENS}/{token.pk}").status_code == 200
    token.refresh_from_db()
    assert token.revoked_by == "static-key"
    (listed,) = api.admin().get(TOKENS).json()
    assert listed["state"] == "revoked"
    for unknown in (str(uuid4()), "nonsense"):
        assert api.admin().delete(f"{TOKENS}/{unknown}").status_code == 404


# --- registering with one


@pytest.mark.rule("http-1.1", "R1.11")
def test_a_new_machine_joins_and_awaits_approval() -> None:
    token = made(note="rack 4")
    assert join(token).json()["status"] == "pending"
    stored, node = row(token), BackendNode.objects.get()
    assert (stored.uses, stored.last_used_by) == (1, "w1")
    assert stored.last_used_at is not None
    assert (node.joined_with, node.joined_note, node.joined_by) == (stored.pk, "rack 4", "root")
    event = NodeEvent.objects.get(kind="registered")
    assert (event.detail["join_token"], event.detail["join_note"]) == (str(stored.pk), "rack 4")
    assert token not in json.dumps(event.detail)
    shown = api.admin().get(f"/api/nodes/{node.pk}").json()
    assert shown["joined"] == {"token": str(stored.pk), "note": "rack 4", "by": "root"}


def test_header_and_body_must_carry_the_same_token() -> None:
    token = made(uses=5)
    for header, body in ((token, REGISTRATION_TOKEN), (REGISTRATION_TOKEN, token), (token, made())):
        answer = join(header, body=body)
        assert answer.status_code == 401
        assert answer.json()["error"]["field"] == "token"
    assert join(token, body="").json()["error"]["message"] == "registration token required"
    assert not BackendNode.objects.exists()
    assert row(token).uses == 0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (expire, "this join token expired at"),
        (
            lambda token: joining.revoke(row(token).pk, actor=ROOT, now=clock.now()),
            "this join token was revoked",
        ),
        (lambda token: join(token, "other"), "this join token is used up: it has admitted 1 of 1 nodes"),
    ],
    ids=["expired", "revoked", "used up"],
)
def test_a_token_that_has_ended_admits_no_new_node_and_says_why(end: Any, said: str) -> None:
    token = made()
    end(token)
    nodes = BackendNode.objects.count()
    answer = join(token, "late")
    assert answer.status_code == 401
    assert said in api.message(answer)
    assert BackendNode.objects.count() == nodes


@pytest.mark.rule("http-1.1")
def test_an_ended_token_records_no_conflict_for_a_stranger() -> None:
    token = made()
    assert join(token, "w1").status_code == 201
    assert join(token, "w1", secret=api.OTHER_SECRET).status_code == 401
    assert not NodeConflict.objects.exists()


def test_unknown_tokens_are_counted_and_ended_ones_are_not(minute: None) -> None:
    ended = made()
    expire(ended)
    assert [join(ended, "late").status_code for _ in range(40)] == [401] * 40
    codes = [join("join-" + f"{number:064x}", "late").status_code for number in range(40)]
    assert set(codes[:30]) == {401}
    assert codes[-1] == 429


@pytest.mark.parametrize("end", [expire, revoke])
def test_a_worker_that_has_joined_restarts_with_its_token_even_when_that_has_ended(end: Any) -> None:
    token = made()
    first = join(token).json()
    end(token)
    again = join(token)
    assert again.status_code == 201
    assert again.json()["id"] == first["id"]
    assert row(token).uses == 1


def test_a_worker_whose_secret_was_revoked_needs_a_new_use() -> None:
    """Its name is known, but not its identity: its old secret is refused, a new one is a new machine."""
    token = made()
    node = BackendNode.objects.get(pk=join(token).json()["id"])
    claims.revoke(node.pk, actor=ROOT, now=clock.now())
    assert join(token).status_code == 401
    assert join(token, secret=api.OTHER_SECRET).status_code == 401
    fresh = made(note="again")
    assert join(fresh, secret=api.OTHER_SECRET).status_code == 201
    node.refresh_from_db()
    assert (row(fresh).uses, node.joined_note) == (1, "again")


def test_a_refused_registration_spends_nothing() -> None:
    token = made()
    api.make_node("agent-1", node_type="agent", address="")
    assert join(token, "agent-1").status_code == 409
    assert join(token, "new", address="").status_code == 400
    assert join(token, "agent-1", secret=api.OTHER_SECRET).status_code == 409
    assert row(token).uses == 0


def test_it_never_admits_a_worker_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, allow_shared_token_nodes=True)
    token = made()
    answer = join(token, secret="")
    assert answer.status_code == 403
    assert "a join token admits no worker without a secret" in api.message(answer)
    assert row(token).uses == 0


def test_it_is_no_key_for_anything_else() -> None:
    token = made()
    node = api.make_node("w1")
    for path in ("/api/nodes", "/api/docs", f"/api/node/{node.pk}/models", "/api/operations"):
        assert api.bearer(token).get(path).status_code == 401, path


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("uses", [1, 3])
def test_racers_never_take_more_uses_than_there_are(uses: int) -> None:
    """Twelve web processes' worth of connections, all past the first look at the token before one commits."""
    token = made(uses=uses)
    now = clock.now()
    tickets = [joining.recognise(token, "", now) for _ in range(12)]

    def racer(number: int) -> Any:
        name = f"w{number}"
        claim = registration.claim(
            registration.Registration(name=name, address="10.0.0.1:1"),
            secret=own_secret(name),
            source_address="10.0.0.1",
            ticket=tickets[number],
        )
        return lambda: registration.register_one(claim, now=now, auto_approve=False)

    results = at_once(*[racer(number) for number in range(12)])
    refused = [one for one in results if isinstance(one, joining.TokenRefused)]
    assert unexpected([one for one in results if one not in refused]) == []
    assert len(refused) == 12 - uses
    assert all("used up" in one.message for one in refused)
    assert BackendNode.objects.count() == row(token).uses == uses


@pytest.mark.django_db(transaction=True)
def test_one_worker_that_asks_twice_at_once_takes_one_use() -> None:
    token = made(uses=5)
    results = at_once(*[lambda: join(token).status_code] * 4)
    assert results == [201] * 4
    assert row(token).uses == 1


def test_a_batch_takes_its_uses_in_one_statement_and_none_if_they_do_not_suffice() -> None:
    token, now = made(uses=2), clock.now()
    new_claims = [
        registration.claim(
            registration.Registration(name=name, address="10.0.0.1:1"),
            secret=own_secret(name),
            source_address="10.0.0.1",
            ticket=joining.recognise(token, "", now),
        )
        for name in ("a", "b", "c")
    ]
    with pytest.raises(joining.TokenRefused):
        registration.register_all(new_claims, now=now, auto_approve=False)
    assert (BackendNode.objects.count(), row(token).uses) == (0, 0)
    registration.register_all(new_claims[:2], now=now, auto_approve=False)
    assert (BackendNode.objects.count(), row(token).uses) == (2, 2)


# --- retention, command line, admin


def test_expired_tokens_go_with_the_events_unless_a_worker_restarts_with_them() -> None:
    gone, kept, young = made(), made(), made()
    join(kept)
    long_ago = clock.now() - timedelta(seconds=settings.CLUSTER.event_retention + 60)
    JoinToken.objects.exclude(pk=row(young).pk).update(expires_at=long_ago)
    tasks.prune_timeline()
    left = set(JoinToken.objects.values_list("token_hash", flat=True))
    assert left == {hash_secret(kept), hash_secret(young)}
    assert hash_secret(gone) not in left
    assert join(kept).status_code == 201


def command(*words: str) -> str:
    out = StringIO()
    call_command("nodes", "join-token", *words, stdout=out)
    return out.getvalue()


def test_the_command_line_makes_lists_and_revokes() -> None:
    said = command("make", "--url", "http://h:1", "--lifetime", "10m", "--uses", "2", "--note", "rack 4")
    token = re.search("join-[0-9a-f]{64}", said)
    assert token is not None
    assert row(token[0]).max_uses == 2
    assert "LOCALAI_REGISTER_TO=http://h:1" in said
    listed = command("list")
    assert ("0 of 2" in listed, "usable" in listed, token[0] in listed) == (True, True, False)
    assert "revoked" in command("revoke", str(row(token[0]).pk)[:8])
    assert json.loads(command("list", "--json"))[0]["state"] == "revoked"


def test_the_command_line_prefers_the_url_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """CLUSTER_PUBLIC_URL is its default: another network may reach the server elsewhere."""
    allow(monkeypatch, public_url="http://public:8080")
    assert "LOCALAI_REGISTER_TO=http://public:8080 " in command("make")
    assert "LOCALAI_REGISTER_TO=http://10.0.0.1:8080 " in command("make", "--url", "http://10.0.0.1:8080")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("make",), "set CLUSTER_PUBLIC_URL, or give --url"),
        (("make", "--url", "nonsense"), "--url is not a base URL"),
        (("make", "--url", "http://h", "--uses", "0"), "uses must be"),
        (("make", "--url", "http://h", "--lifetime", "8760h"), "lifetime_seconds must be"),
        (("revoke", "ffffffff"), "there is no join token"),
    ],
)
def test_the_command_line_says_what_is_wrong(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(CommandError, match=re.escape(said)):
        command(*words)


def test_the_admin_shows_and_revokes_them() -> None:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root", password="x"))
    token = row(made(note="rack 4"))
    url = "/admin/nodes/jointoken/"
    listed = client.get(url).content.decode()
    assert "rack 4" in listed
    assert token.token_hash not in client.get(f"{url}{token.pk}/change/").content.decode()
    client.post(url, {"action": "revoke", "_selected_action": [str(token.pk)]})
    token.refresh_from_db()
    assert token.revoked_by == "root"


def edit(token: str, **changes: object) -> tuple[str, JoinToken]:
    """Edit a token in the admin; return the text of the answer and the row."""
    client = Client()
    client.force_login(
        get_user_model().objects.get_or_create(username="root", is_superuser=True, is_staff=True)[0]
    )
    stored = row(token)
    fields = {"note": stored.note, "max_uses": stored.max_uses, "expires_at": stored.expires_at} | changes
    expires_at = fields.pop("expires_at")
    form = fields | {"expires_at_0": f"{expires_at:%Y-%m-%d}", "expires_at_1": f"{expires_at:%H:%M:%S}"}
    answer = client.post(f"/admin/nodes/jointoken/{stored.pk}/change/", form, follow=True)
    return answer.content.decode(), row(token)


def test_the_admin_edits_note_expiry_and_uses() -> None:
    token = made(uses=1)
    assert join(token).status_code == 201
    expire(token)
    expires_at = (clock.now() + timedelta(days=2)).replace(microsecond=0)
    _, stored = edit(token, note="rack 5", max_uses=3, expires_at=expires_at)
    assert (stored.note, stored.max_uses, stored.uses, stored.expires_at) == ("rack 5", 3, 1, expires_at)
    assert join(token, "w2").status_code == 201
    audited = AuditEntry.objects.get()
    assert (audited.kind, audited.actor, audited.subject_id) == ("admin.changed", "root", str(stored.pk))


def test_an_edit_of_the_note_leaves_the_expiry_of_an_expired_token() -> None:
    token = made()
    expire(token)
    expires_at = row(token).expires_at
    _, stored = edit(token, note="rack 5")
    assert (stored.note, stored.expires_at) == ("rack 5", expires_at)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"max_uses": 1}, "max_uses must be a whole number from 2 to 1000."),
        ({"max_uses": 1001}, "max_uses must be a whole number from 2 to 1000."),
        ({"expires_at": clock.now() + timedelta(days=8)}, "expires_at must be in the next 7 days"),
        ({"expires_at": clock.now() - timedelta(days=1)}, "expires_at must be in the next 7 days"),
        ({"note": "a\u202eb"}, "note must not contain the character"),
    ],
)
def test_the_admin_refuses_edits_that_joining_refuses(changes: dict[str, object], refusal: str) -> None:
    token = made(uses=3)
    assert [join(token, name).status_code for name in ("w1", "w2")] == [201, 201]
    before = row(token)
    page, stored = edit(token, **changes)
    assert refusal in page
    assert (stored.note, stored.max_uses, stored.expires_at) == (before.note, 3, before.expires_at)


def test_nobody_edits_a_revoked_token() -> None:
    token = made()
    revoke(token)
    _, stored = edit(token, note="rack 5")
    assert stored.note == ""
    with pytest.raises(errors.Conflict, match="revoked"):
        joining.change(stored.pk, {"note": "rack 5"}, actor=ROOT, now=clock.now())
    with pytest.raises(errors.NotFound):
        joining.change(uuid4(), {}, actor=ROOT, now=clock.now())


def test_the_admin_says_with_which_token_a_node_came() -> None:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("root", password="x"))
    node = join(made(note="rack 4"), version="0.0.9").json()["id"]
    page = client.get(f"/admin/nodes/backendnode/{node}/change/").content.decode()
    for shown in (">rack 4<", ">root<", ">0.0.9<"):
        assert shown in page, shown


@pytest.mark.parametrize("version", ["v" * 65, "1\u202e2", 1])
def test_a_version_is_a_short_printable_text(version: Any) -> None:
    answer = join(made(), version=version)
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, "version")


def test_the_command_line_and_the_list_mark_another_version() -> None:
    join(made(), version="0.0.9")
    (node,) = api.admin().get("/api/nodes").json()
    assert node["worker_version"] == "0.0.9"
    out = StringIO()
    call_command("nodes", "list", stdout=out)
    assert node["version_skew"] in out.getvalue()


def test_the_verbs_name_an_unknown_token() -> None:
    with pytest.raises(errors.NotFound):
        joining.revoke(uuid4(), actor=ROOT, now=clock.now())
