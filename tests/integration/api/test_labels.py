"""Labels of a node by REST (`contract/http-api.md` §2.7) and by the services behind it."""

import json
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from localai_cluster.accounts import actors
from localai_cluster.asgi import application
from localai_cluster.kit import clock
from nodes.models import BackendNode, ModelSchedulingConfig, NodeEvent, NodeLabel
from nodes.registry.labels import edit_labels
from tests.support import api, hot
from tests.support.effort import EFFORT
from tests.support.environment import API_KEY

pytestmark = pytest.mark.django_db


def path(node: BackendNode | Any, key: str | None = None) -> str:
    found = node.id if isinstance(node, BackendNode) else node
    return f"/api/nodes/{found}/labels" + ("" if key is None else f"/{quote(key, safe='')}")


def bare_node(name: str = "w1", **labels: str) -> BackendNode:
    """A node with these labels and no others."""
    node = api.make_node(name)
    edit_labels(node.id, labels, drop=None, actor=actors.STATIC_KEY, now=clock.now())
    return node


@pytest.mark.rule("T-REG-33", "R1.40", "http-2.7")
def test_two_labels_can_be_set_and_read_back() -> None:
    """PUT stores them, GET shows a flat object."""
    node = bare_node()
    assert api.admin().put(path(node), {"a": "1", "b": "2"}).json() == {"a": "1", "b": "2"}
    assert api.admin().get(path(node)).json() == {"a": "1", "b": "2"}


@pytest.mark.rule("T-REG-34", "R1.40", "http-2.7")
def test_setting_an_existing_key_overwrites_its_value() -> None:
    """PATCH answers the full resulting set."""
    node = bare_node(a="1", b="2")
    merged = api.admin().patch(path(node), {"a": "3", "c": ""})
    assert (merged.status_code, merged.json()) == (200, {"a": "3", "b": "2", "c": ""})
    assert NodeLabel.objects.filter(node=node, key="a").count() == 1


@pytest.mark.rule("T-REG-35", "R1.40", "http-2.7")
def test_removing_one_key_leaves_the_other() -> None:
    """204 and no body, also for a key that is not there."""
    node = bare_node(a="1", b="2")
    for _ in range(2):
        gone = api.admin().delete(path(node, "a"))
        assert (gone.status_code, gone.content) == (204, b"")
        assert "Content-Type" not in gone.headers
    assert api.admin().get(path(node)).json() == {"b": "2"}


@pytest.mark.rule("T-REG-36", "R1.40", "http-2.7")
def test_replacing_all_drops_earlier_labels() -> None:
    """Those of the registry too; they come back with the next registration."""
    node = api.make_node(labels={"tier": "t1"})
    assert "node.name" in api.admin().get(path(node)).json()
    assert api.admin().put(path(node), {"x": "1"}).json() == {"x": "1"}
    assert api.admin().put(path(node), {}).json() == {}
    api.make_node()
    assert api.admin().get(path(node)).json()["node.name"] == "w1"


@pytest.mark.rule("http-2.7")
@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_the_id_of_the_path_never_becomes_a_label(method: str) -> None:
    """QUIRK: the reference stores it; a label that is really called `id` is one like any other."""
    node = bare_node()
    assert api.admin().send(method, path(node), {"x": "1"}).json() == {"x": "1"}
    assert api.admin().send(method, path(node), {"id": "mine"}).json()["id"] == "mine"
    assert not NodeLabel.objects.filter(value=str(node.id)).exists()


@pytest.mark.rule("R1.40")
def test_any_label_change_ends_cooldowns() -> None:
    """Set, replace and remove; §2.7."""
    node = bare_node(a="1")
    rule = ModelSchedulingConfig.objects.create(model_name="m")
    for method, where, body in [
        ("PATCH", path(node), {"b": "1"}),
        ("PUT", path(node), {"c": "1"}),
        ("DELETE", path(node, "c"), None),
    ]:
        ModelSchedulingConfig.objects.update(unsatisfiable_until=clock.now(), unsatisfiable_ticks=2)
        assert api.admin().send(method, where, body).status_code in (200, 204)
        rule.refresh_from_db()
        assert (rule.unsatisfiable_until, rule.unsatisfiable_ticks) == (None, 0), method


@pytest.mark.rule("http-2.7")
@pytest.mark.parametrize("node_id", ["nope", "00000000-0000-4000-8000-00000000dead", "%00"])
def test_unknown_nodes_are_404_by_every_method(node_id: str) -> None:
    """Where the reference answers `{}` or 204; and before the body is looked at."""
    caller = api.admin()
    for answer in (
        caller.get(path(node_id)),
        caller.put(path(node_id), {"x": "1"}),
        caller.patch(path(node_id), ["no"]),
        caller.delete(path(node_id, "x")),
    ):
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "node_error")


BODIES: list[tuple[Any, str]] = [
    (["no"], "invalid request body"),
    (b"{", "invalid request body"),
    (b"null", "invalid request body"),
    ({"zone": 5}, "labels.zone"),
    ({"zone": None}, "labels.zone"),
    ({"zone": {"a": "b"}}, "labels.zone"),
    ({"zone": True}, "labels.zone"),
    ({"": "x"}, "labels"),
    ({" ": "x"}, "labels"),
    ({"k" * 129: "x"}, "labels"),
    ({"k": "v" * 256}, "labels.k"),
    ({"k": "a\x00b"}, "labels.k"),
    ({"k": "a\u202eb"}, "labels.k"),
    ({"k\u200b": "x"}, "labels"),
    ({"k\ud800": "x"}, "labels"),
    ({"k\ud800": 5}, "labels"),
    ({f"k{n}": "x" for n in range(65)}, "labels"),
]


@pytest.mark.rule("http-2.7", "R1.40")
@pytest.mark.parametrize(("body", "says"), BODIES, ids=[str(number) for number in range(len(BODIES))])
def test_bad_labels_are_400_and_name_the_key(body: Any, says: str) -> None:
    """A number is no text, a list is no object; nothing is stored."""
    node = bare_node(a="1")
    for method in ("PUT", "PATCH"):
        refused = api.admin().send(method, path(node), body)
        assert refused.status_code == 400, refused.content
        assert says in api.message(refused)
    assert api.admin().get(path(node)).json() == {"a": "1"}


KEYS = [
    "models/llama",
    "a:b",
    "user@host",
    "a#b",
    "a b",
    "50%",
    "a%2Fb",
    "a+b",
    "ü",
    "/a//b",
    "a?b=c&d",
    "a/",
]


@pytest.mark.rule("http-2.7", "http-0.1")
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.django_db(transaction=True)
async def test_keys_are_decoded_exactly_once(key: str) -> None:
    """Through the whole application: an encoded key removes that label and no other."""
    decoys = {quote(key, safe=""): "encoded", "kept": "1"}
    node = await hot.in_thread(lambda: bare_node(**{**decoys, key: "wanted"}))
    transport = httpx.ASGITransport(app=application)
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://ours", headers=headers) as client:
        assert (await client.delete(path(node, key))).status_code == 204
        left = (await client.get(path(node))).json()
    assert left == {name: value for name, value in decoys.items() if name != key}


@pytest.mark.rule("http-2.7")
@pytest.mark.parametrize("key", [".", "..", "../../other", "a/../b", "a/."])
def test_no_part_of_a_key_leads_elsewhere(key: str) -> None:
    """A client would resolve `DELETE …/labels/../../<other>` to the removal of another node."""
    node = bare_node()
    for method in ("PUT", "PATCH"):
        refused = api.admin().send(method, path(node), {key: "1"})
        assert refused.status_code == 400
        assert "labels" in api.message(refused)


@pytest.mark.rule("http-2.7")
def test_a_key_may_come_without_encoding() -> None:
    """The UI sends it as it is: slashes are part of the key."""
    node = bare_node(**{"models/llama:70b@x": "1"})
    assert api.admin().delete(f"/api/nodes/{node.id}/labels/models/llama:70b@x").status_code == 204
    assert api.admin().get(path(node)).json() == {}


@pytest.mark.rule("http-2.7")
@pytest.mark.parametrize("key", ["%00", "x" * 5000, "%E2%80%AE"])
def test_a_key_that_no_label_can_have_is_absent(key: str) -> None:
    """204, as for every key that is not there."""
    node = bare_node()
    assert api.admin().delete(f"/api/nodes/{node.id}/labels/{key}").status_code == 204


def test_a_label_change_is_one_event_and_none_if_nothing_changes() -> None:
    """The timeline says who set what."""
    node = bare_node()
    NodeEvent.objects.all().delete()
    api.admin().patch(path(node), {"a": "1"})
    api.admin().patch(path(node), {"a": "1"})
    api.admin().delete(path(node, "zz"))
    event = NodeEvent.objects.get()
    assert (event.kind, event.actor, event.detail) == (
        "labels",
        "static-key",
        {"set": {"a": "1"}, "removed": []},
    )


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=3)


@given(body=st.dictionaries(st.text(max_size=5), JSON, max_size=4) | JSON, put=st.booleans())
@settings(max_examples=60 * EFFORT, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_body_ends_in_200_or_400(body: Any, put: bool) -> None:
    """Never a 500; and what is answered is what is stored."""
    node = BackendNode.objects.first() or api.make_node()
    answer = api.admin().send("PUT" if put else "PATCH", path(node), json.dumps(body).encode())
    assert answer.status_code in (200, 400)
    if answer.status_code == 200:
        assert api.admin().get(path(node)).json() == answer.json()
