"""`manage.py nodes`: what it prints, what it does, and what it says to anyone who asks for what cannot be."""

import os
import pwd
from functools import partial
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from localai_cluster.accounts.actors import MAKE_RUN, WORKER
from localai_cluster.kit import clock
from nodes.models import BackendNode, NodeConflict, NodeEvent, NodeModel
from nodes.registry import lifecycle
from tests.support import api, command_line

pytestmark = pytest.mark.django_db
run = partial(command_line.run, "nodes")
told = partial(command_line.told, "nodes")
refused = partial(command_line.refused, "nodes")

ME = pwd.getpwuid(os.getuid()).pw_name


def last_event(node: BackendNode) -> NodeEvent:
    return NodeEvent.objects.filter(node_id=node.id).latest("id")


def claim(node: BackendNode) -> NodeConflict:
    """Another worker's claim to that node."""
    assert api.register(api.registration(node.name), api.OTHER_SECRET).status_code == 409
    return NodeConflict.objects.get(node=node)


def test_the_list_is_aligned_and_says_what_needs_an_admin() -> None:
    api.make_node("short", total_vram=24 * 2**30, available_vram=12 * 2**30, gpu_vendor="nvidia")
    pending = api.make_node("a-much-longer-name", approved=False)
    lifecycle.reject(pending.id, actor=MAKE_RUN, now=clock.now(), reason="not ours")
    claim(pending)
    head, first, second = run("list").splitlines()
    assert head.split()[:3] == ["NAME", "STATUS", "TYPE"]
    assert first.startswith("a-much-longer-name  pending  backend  127.0.0.1:51100")
    assert "rejected, conflicts: 1" in first
    assert second.startswith("short               healthy  backend  127.0.0.1:51100")
    assert "nvidia  12.0 GiB of 24.0 GiB" in second
    assert " s ago " in second
    assert head.index("STATUS") == first.index("pending") == second.index("healthy")
    assert run("list", "--status", "offline") == "no nodes\n"


def test_the_list_as_json_is_that_of_the_api() -> None:
    api.make_node("a", total_vram=1, labels={"tier": "fast"})
    api.make_node("b", approved=False)
    assert told("list") == api.admin().get("/api/nodes").json()
    assert told("list", "--status", "pending") == api.admin().get("/api/nodes?status=pending").json()


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        (["--label", "tier=fast"], ["a", "c"]),
        (["--label", "tier=fast", "--label", "zone=x"], ["c"]),
        (["--status", "pending"], ["b"]),
        (["--type", "agent"], ["b"]),
        (["--search", "10.0.0"], ["c"]),
        (["--vendor", "amd"], ["a"]),
        (["--sort=-name"], ["c", "b", "a"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_filters(filters: list[str], names: list[str]) -> None:
    api.make_node("a", labels={"tier": "fast"}, gpu_vendor="amd")
    api.make_node("b", approved=False, node_type="agent")
    api.make_node("c", labels={"tier": "fast", "zone": "x"}, address="10.0.0.1:1")
    assert [row["name"] for row in told("list", *filters)] == names


@pytest.mark.parametrize(
    ("filters", "words"),
    [(["--label", "tier"], "key=value"), (["--sort", "colour"], "sort must be one of")],
    ids=["label", "sort"],
)
def test_a_wrong_filter_is_named(filters: list[str], words: str) -> None:
    assert words in refused("list", *filters)


def test_a_node_is_found_by_name_id_and_beginning_of_the_id() -> None:
    node = api.make_node("Box.1")
    for text in ("Box.1", "box.1", str(node.id), str(node.id)[:8], str(node.id)[:8].upper()):
        assert told("show", text)["id"] == str(node.id)


def test_a_name_does_not_pass_for_the_id_of_another_node() -> None:
    """A worker chooses its name; anyone who approves by id means the node with that id."""
    meant = api.make_node("w1", approved=False)
    other = api.make_node(str(meant.id)[:8], approved=False)
    assert "use the full id" in refused("approve", other.name)
    api.make_node(str(meant.id), approved=False)
    told("approve", str(meant.id))
    assert api.node(meant.id).status == "healthy"
    assert told("show", str(other.id))["name"] == other.name


def test_unknown_and_ambiguous_names_say_how_to_find_the_right_one() -> None:
    ids = ["abcd0000-0000-4000-8000-000000000000", "abcd1111-0000-4000-8000-000000000000"]
    for name, node_id in zip(("one", "two"), ids, strict=True):
        BackendNode.objects.create(id=node_id, name=name, address="h:1")
    assert refused("show", "w9") == "there is no node 'w9'; `manage.py nodes list` lists them"
    assert refused("drain", "%") == "there is no node '%'; `manage.py nodes list` lists them"
    assert "is an id prefix of one, two" in refused("show", "abcd")
    assert told("show", "abcd1")["name"] == "two"


def test_show_as_json_is_that_of_the_api() -> None:
    node = api.make_node()
    assert told("show", "w1") == api.admin().get(f"/api/nodes/{node.id}").json()


def test_show_tells_facts_identity_labels_and_what_happened() -> None:
    node = api.make_node(labels={"tier": "fast"}, total_ram=2**30)
    NodeModel.objects.create(node=node, model_name="m", address="h:1", phase="serving", in_flight=3)
    run("drain", "w1", "--reason", "new disk")
    text = run("show", "w1")
    lines = dict(line.split("  ", 1) for line in text.splitlines() if "  " in line)
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts["status"] == "draining"
    assert facts["total ram"] == "1.0 GiB"
    assert facts["label tier"] == "fast"
    assert facts["drain: reason"] == "new disk"
    assert facts["drain: in flight"] == "3"
    since = api.node(node.id).drained_at
    assert since is not None
    assert facts["drain: since"] == f"{since:%Y-%m-%d %H:%M:%S}Z"
    assert facts["identity: fingerprint"] == node.fingerprint
    assert facts["approval"].endswith("Z by auto-approval")
    assert f"drained     healthy -> draining  {ME}" in text
    assert text.index("drained  ") < text.index("registered  "), "newest first"


@pytest.mark.rule("R1.15")
def test_approve() -> None:
    node = api.make_node(approved=False)
    answer = told("approve", "w1")
    assert answer == {
        "id": str(node.id),
        "name": "w1",
        "node_type": "backend",
        "status": "healthy",
        "message": "node approved",
    }
    event = last_event(node)
    assert (event.kind, event.actor_kind, event.actor) == ("approved", "command", ME)
    assert refused("approve", "w1") == (
        "w1: the node is healthy; only a pending node can be approved; nothing to do"
    )
    run("drain", "w1")
    assert "`manage.py nodes resume w1`" in refused("approve", "w1")


@pytest.mark.rule("R1.31")
def test_the_token_of_an_agent_is_shown_once() -> None:
    api.make_node("agent", node_type="agent", approved=False)
    assert "API token (shown only once): lai-" in run("approve", "agent")


def test_approving_several_goes_on_after_a_failure_and_says_so() -> None:
    """The exit code is 1 all the same."""
    for name in ("a", "b", "c"):
        api.make_node(name, approved=name == "b")
    out = StringIO()
    with pytest.raises(CommandError, match="1 of 3 could not be approved"):
        call_command("nodes", "approve", "a", "b", "c", stdout=out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "a: node approved"
    assert lines[1].startswith("b: the node is healthy")
    assert lines[2] == "c: node approved"
    assert set(BackendNode.objects.values_list("status", flat=True)) == {"healthy"}


def test_approving_several_answers_like_the_api() -> None:
    nodes = [api.make_node(name, approved=False) for name in ("a", "b")]
    results = [{"id": str(node.id), "name": node.name, "status": "healthy"} for node in nodes]
    assert told("approve", "a", "b") == {"approved": 2, "results": results}


def test_an_unknown_node_among_several_approves_none() -> None:
    node = api.make_node(approved=False)
    assert "no node 'w9'" in refused("approve", "w1", "w9")
    assert api.node(node.id).status == "pending"


def test_reject() -> None:
    node = api.make_node(approved=False)
    assert run("reject", "w1", "--reason", "not ours") == "w1: node rejected; it is pending\n"
    assert api.node(node.id).reject_reason == "not ours"
    run("approve", "w1")
    assert "`manage.py nodes drain w1` or `revoke w1`" in refused("reject", "w1", "--reason", "late")
    with pytest.raises(CommandError, match="--reason"):
        run("reject", "w1")


@pytest.mark.rule("R1.18", "R1.19")
def test_drain_and_resume() -> None:
    node = api.make_node()
    drained = run("drain", "w1", "--reason", "new disk", "--deadline", "10m")
    assert drained == "w1: node set to draining; it is draining\n"
    row = api.node(node.id)
    assert row.drained_at
    assert row.drain_deadline
    assert (row.drain_reason, row.drained_by) == ("new disk", ME)
    assert (row.drain_deadline - row.drained_at).total_seconds() == 600
    assert told("resume", "w1") == {"message": "node resumed"}
    assert api.node(node.id).status == "healthy"
    assert refused("resume", "w1") == "w1: the node is healthy; nothing to do"
    with pytest.raises(CommandError, match="not a duration"):
        run("drain", "w1", "--deadline", "soon")
    with pytest.raises(CommandError, match="longer than 876000h"):
        run("join-token", "make", "--url", "http://x", "--lifetime", f"{'9' * 400}h")


@pytest.mark.rule("R1.18")
def test_a_pending_node_cannot_be_resumed() -> None:
    """D-RESUME-PENDING."""
    api.make_node(approved=False)
    assert "`manage.py nodes approve w1`" in refused("resume", "w1")


@pytest.mark.rule("R1.40")
def test_labels_are_set_and_removed_in_one_change() -> None:
    node = api.make_node(labels={"tier": "slow"})
    answer = told("label", "w1", "tier=fast", "zone=a=b-", "empty=", "node.name-")
    assert answer == {"empty": "", "node.replica-slots": "1", "tier": "fast", "zone": "a=b-"}
    event = last_event(node)
    assert event.detail["removed"] == ["node.name"]
    assert event.detail["set"] == {"empty": "", "tier": "fast", "zone": "a=b-"}
    assert run("label", "w1").splitlines() == ["empty=", "node.replica-slots=1", "tier=fast", "zone=a=b-"]
    assert NodeEvent.objects.filter(node_id=node.id, kind="labels").count() == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("tier", "KEY=VALUE"), ("-", "KEY=VALUE"), ("=x", "a key must"), ("a=\u202e", "U+202E")],
    ids=["bare", "dash", "keyless", "bidi"],
)
def test_what_is_no_label_is_refused(text: str, words: str) -> None:
    api.make_node()
    assert words in refused("label", "w1", "--", text)


def test_a_conflict_is_shown_and_accepted() -> None:
    node = api.make_node()
    conflict = claim(node)
    assert told("conflicts") == told("conflicts", "w1") == api.admin().get("/api/nodes/conflicts").json()
    line = run("conflicts").splitlines()[1]
    assert line.startswith(f"{str(conflict.id)[:8]}  w1    open   secret  127.0.0.1")
    assert run("accept", str(conflict.id)[:8]) == "w1: conflict accepted; it is offline\n"
    assert run("conflicts") == "no conflicts\n"
    assert api.register(api.registration(), api.OTHER_SECRET).status_code == 201
    assert "already resolved" in refused("accept", str(conflict.id))


def test_a_conflict_is_refused() -> None:
    node = api.make_node()
    conflict = claim(node)
    assert told("refuse", str(conflict.id)) == {"message": "conflict refused"}
    conflict.refresh_from_db()
    assert (conflict.state, conflict.decided_by) == ("refused", ME)
    assert run("conflicts") == "no conflicts\n"
    assert run("conflicts", "w1").splitlines()[1].split()[2] == "refused"
    assert "`manage.py nodes conflicts`" in refused("refuse", "w1")


def test_rotate_and_revoke() -> None:
    node = api.make_node()
    assert run("rotate", "w1") == "w1: rotation requested; it is healthy\n"
    assert api.node(node.id).rotation_requested_at
    assert run("revoke", "w1", "--reason", "stolen") == "w1: identity revoked; it is pending\n"
    assert api.node(node.id).revoke_reason == "stolen"
    assert api.register(api.registration()).status_code == 403
    assert "registered with its own secret" in refused("revoke", "w1")
    assert "registered with its own secret" in refused("rotate", "w1")
    assert "a new secret" in refused("approve", "w1")


@pytest.mark.rule("R1.21")
def test_remove_keeps_the_timeline() -> None:
    node = api.make_node()
    assert run("remove", "w1") == "w1: node deregistered\n"
    assert not BackendNode.objects.exists()
    assert last_event(node).actor == ME


def test_what_strangers_send_reaches_no_terminal() -> None:
    """An address, a reason or a cause may have been written by anybody."""
    node = api.make_node()
    BackendNode.objects.filter(pk=node.id).update(gpu_vendor="\x1b[31m")
    lifecycle.mark_unhealthy(node.id, actor=WORKER, now=clock.now(), reason="a\x1b]0;x\x07b")
    assert "\x1b" not in run("list") + run("show", "w1")
