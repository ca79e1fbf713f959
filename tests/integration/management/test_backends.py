"""`manage.py backends`: what it prints, what it asks for, and how it follows an operation to its end."""

import asyncio
import json
import os
import pwd
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError

from localai_cluster.kit import clock
from nodes.backends import admission, intents, upgrade_state
from nodes.backends.backend_requests import INSTALL, BackendRequest, RequestScope
from nodes.backends.installed import Offered
from nodes.backends.intents import Ended, Failed
from nodes.models import BackendNode, BackendOffer, NodeBackend, NodeModel, PendingBackendOp
from operations.api import jobs
from operations.changes import events
from operations.ledger.admission import Requester
from operations.ledger.progress import Tick
from operations.management import following
from operations.models import Operation, OperationTarget
from tests.support import api, command_line, hot
from tests.support.terminal import Screen

pytestmark = pytest.mark.django_db(transaction=True)
run = partial(command_line.run, "backends")

DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def three() -> list[BackendNode]:
    """Nodes with a backend that has an upgrade and drifted on one, one without upgrade, a system backend."""
    nodes = [api.make_node(f"w{number}", secret=f"{number:064x}") for number in range(3)]
    for node in nodes:
        version = "0.9" if node.name == "w2" else "1.0"
        NodeBackend.objects.create(node=node, name="minilm", version=version, digest=DIGEST)
    NodeBackend.objects.create(node=nodes[0], name="echo\x1b[31m", version="1.0")
    NodeBackend.objects.create(node=nodes[0], name="sys", is_system=True)
    BackendOffer.objects.create(name="minilm", version="1.1")
    assert upgrade_state.offers() == {"minilm": Offered("1.1")}
    return nodes


def test_the_list_is_aligned_and_names_upgrades_and_other_builds(three: list[BackendNode]) -> None:
    """A text from a worker cannot steer the terminal."""
    head, echo, minilm, system = run("list").splitlines()
    assert head.split("  ")[0] == "NAME"
    assert minilm.split() == ["minilm", "1.0", DIGEST[:19], "3", "w2", "1.1"]
    assert echo.split() == ["echo?[31m", "1.0", "-", "1", "-", "-"]
    assert system.split()[:2] == ["sys", "system"]
    assert len({line.index("1.0") for line in (echo, minilm)}) == 1


def test_only_those_with_an_upgrade(three: list[BackendNode]) -> None:
    assert [line.split()[0] for line in run("list", "--upgrades").splitlines()] == ["NAME", "minilm"]


def test_json_is_the_answer_of_the_api(three: list[BackendNode]) -> None:
    assert json.loads(run("list", "--json")) == api.admin().get("/backends").json()


def test_an_empty_cluster_says_so() -> None:
    assert run("list") == "no backends\n"


def asked(*arguments: str, screen: Screen | None = None) -> str:
    """What a command prints that succeeds."""
    out = screen or Screen()
    call_command("backends", *arguments, stdout=out)
    assert not out.left, "every step happened"
    return out.getvalue()


def refused(*arguments: str, screen: Screen | None = None, code: int = 1) -> str:
    """Why a command ends with that exit code."""
    with pytest.raises(CommandError) as caught:
        call_command("backends", *arguments, stdout=screen or StringIO())
    assert caught.value.returncode == code
    return str(caught.value)


def begin() -> None:
    """A controller takes up what is due."""
    assert intents.claim("controller", now=clock.now(), lease=60, limit=100)


def tick(name: str, done: int, total: int = 2**30) -> Callable[[], None]:
    """The worker of that node reports so many hundredths."""

    def step() -> None:
        row = PendingBackendOp.objects.get(node__name=name)
        bytes = done * total // 100
        report = Tick("downloading", "f", bytes, total, done, "weights.bin", row.node_id, name)
        assert intents.record({(row.id, row.fence): [report]}, now=clock.now()) == set()

    return step


def end(name: str, outcome: Any = None) -> Callable[[], None]:
    """The attempt on that node is over."""

    def step() -> None:
        row = PendingBackendOp.objects.get(node__name=name)
        assert not intents.record_outcomes({(row.id, row.fence): (outcome or Ended(), ())}, now=clock.now())

    return step


def failed(name: str, error: str) -> Callable[[], None]:
    return end(name, Ended(error=error))


def both(*steps: Callable[[], None]) -> Callable[[], None]:
    """One after the other."""

    def step() -> None:
        for one in steps:
            one()

    return step


@pytest.fixture(autouse=True)
def only_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but news leads to a second look; a test does not wait for news that do not come."""
    wait_for_news = following._wait_for_change
    monkeypatch.setattr(following, "READ_INTERVAL", 600.0)
    monkeypatch.setattr(
        following, "_wait_for_change", lambda woken: asyncio.wait_for(wait_for_news(woken), 30)
    )


def test_an_install_is_followed_with_a_line_for_each_change() -> None:
    """What leads from one line to the next is a notification alone. A tenth of a download is a change."""
    hot.node("a")
    screen = Screen(
        ("a: queued", begin),
        ("a: resolving", tick("a", 5)),
        ("a: downloading 5 %", both(tick("a", 7), tick("a", 41))),
        ("a: downloading 41 %", end("a")),
    )
    text = asked("install", "local@echo", screen=screen)
    operation = Operation.objects.get()
    assert text.splitlines() == [
        f"backend installation started: operation {operation.id}",
        "a: queued: waits for a controller",
        "a: resolving: contacting a",
        "a: downloading 5 % (51.2 MiB of 1.0 GiB): f",
        "a: downloading 41 % (419.8 MiB of 1.0 GiB): f",
        "a: done",
        f"operation {str(operation.id)[:8]} completed",
    ]
    assert (operation.status, operation.actor) == ("completed", pwd.getpwuid(os.getuid()).pw_name)
    wish = BackendRequest.of(operation)
    assert (wish.backend, wish.gallery, wish.force) == ("echo", "local", False)
    assert operation.payload["all_nodes"] is True


def test_a_lost_notification_costs_a_few_seconds_and_an_outage_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows are read again from time to time; a read that fails is repeated."""

    async def deaf(*channels: str) -> AsyncIterator[tuple[str, str]]:
        return
        yield

    monkeypatch.setattr(events, "listen", deaf)
    monkeypatch.setattr(following, "READ_INTERVAL", 0.01)
    real, fails = jobs.read_entry, [OperationalError("the server is gone")]

    def broken_once(id: Any) -> Any:
        if fails and PendingBackendOp.objects.filter(lease_until__isnull=False).exists():
            raise fails.pop()
        return real(id)

    monkeypatch.setattr(following, "read_entry", broken_once)
    hot.node("a")
    assert "completed" in asked("install", "echo", screen=Screen(("queued", begin), ("resolving", end("a"))))
    assert not fails
    assert "not read: OperationalError" in caplog.text


def test_an_operation_that_failed_ends_with_exit_code_1_and_the_reasons_by_node() -> None:
    for name in ("a", "b", "c"):
        hot.node(name)
    screen = Screen(
        ("0 of 3 nodes done", begin),
        (
            "resolving",
            both(end("a"), end("b", Ended(error="disk full")), end("c", Ended(error="no\x1b[31m"))),
        ),
    )
    said = refused("install", "echo", screen=screen).splitlines()
    id = str(Operation.objects.get().id)[:8]
    assert said == [
        f"operation {id} failed on 2 of 3 nodes; `manage.py operations retry {id}` tries again",
        "b: failed: disk full",
        "c: failed: no?[31m",
    ]
    assert "a: done" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_an_attempt_that_is_repeated_says_so() -> None:
    hot.node("a")
    screen = Screen(
        ("queued", begin), ("resolving", end("a", Failed("no answer"))), ("trying again: no answer", cancel)
    )
    assert "cancelled by ann" in refused("install", "echo", screen=screen)
    assert "(next attempt 20" in screen.getvalue()


def cancel() -> None:
    admission.cancel(Operation.objects.get().id, actor="ann", now=clock.now())


def test_json_is_the_operation_as_it_ended_or_the_answer_of_the_request() -> None:
    hot.node("a")
    answer = json.loads(asked("install", "echo", "--detach", "--json"))
    id = str(Operation.objects.get().id)
    assert answer == {
        "jobID": id,
        "uuid": id,
        "statusUrl": f"/api/backends/job/{id}",
        "message": "backend installation started",
    }
    again = json.loads(asked("install", "echo", "--detach", "--json"))
    assert (again["jobID"], again["deduplicated"]) == (id, True)
    begin()
    failed("a", "disk full")()
    admission.admit(
        BackendRequest(INSTALL, "echo"),
        RequestScope(list(BackendNode.objects.all()), Requester("ann")),
        now=clock.now(),
    )
    cancel_latest()
    screen = Screen()
    with pytest.raises(CommandError, match="cancelled by ann"):
        call_command("operations", "show", str(latest().id), "--follow", "--json", stdout=screen)
    ended = json.loads(screen.getvalue())
    assert (ended["jobID"], ended["status"]) == (str(latest().id), "cancelled")


def latest() -> Operation:
    return Operation.objects.latest("created_at")


def cancel_latest() -> None:
    admission.cancel(latest().id, actor="ann", now=clock.now())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide, and able to draw in place."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.mark.usefixtures("terminal")
def test_a_terminal_shows_bars_with_bytes_and_the_time_left() -> None:
    for name in ("a", "b"):
        hot.node(name)
    screen = Screen(
        ("queued", begin),
        ("contacting a", tick("a", 25)),
        ("256.0 MiB of 1.0 GiB", tick("a", 75)),
        ("768.0 MiB of 1.0 GiB", both(end("a"), end("b"))),
        terminal=True,
    )
    text = asked("install", "echo", screen=screen)
    assert "━" in text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"75% 768\.0 MiB of 1\.0 GiB 00:0\d downloading: f", plain)
    assert text.splitlines()[-1].endswith("completed")


@pytest.mark.usefixtures("terminal")
def test_a_terminal_shows_twenty_lines_at_most_and_counts_the_rest() -> None:
    for number in range(30):
        hot.node(f"node-{number:02}")
    screen = Screen(
        ("and 12 more: 12 queued", lambda: end_of(["node-00"], begin_all)),
        ("1 of 30 nodes done", cancel),
        terminal=True,
    )
    said = refused("install", "echo", screen=screen)
    assert "29 cancelled, 1 had already finished (by ann)" in said
    drawn = screen.getvalue().split("backend install of echo")[1]
    assert drawn.count("node-") == following.MAX_LINES_SHOWN - 2


def begin_all() -> None:
    intents.claim("controller", now=clock.now(), lease=60, limit=100)


def end_of(names: list[str], first: Callable[[], None]) -> None:
    first()
    for name in names:
        end(name)()


@pytest.mark.usefixtures("terminal")
def test_names_from_workers_steer_no_terminal() -> None:
    """Neither escape sequences nor markup."""
    hot.node("a[red]x")
    screen = Screen(
        ("a[red]x", begin), ("contacting", end("a[red]x", Ended(error="\x1b]0;mine\x07"))), terminal=True
    )
    assert refused("install", "echo", screen=screen).endswith("a[red]x: failed: ?]0;mine?")
    assert "\x1b]0" not in screen.getvalue()


def interrupted_while_reading(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(("a: resolving", lambda: signal.raise_signal(signal.SIGINT)))


def interrupted_while_waiting(monkeypatch: pytest.MonkeyPatch) -> Screen:
    async def ctrl_c(*channels: str) -> AsyncIterator[tuple[str, str]]:
        signal.raise_signal(signal.SIGINT)
        yield "", ""

    monkeypatch.setattr(events, "listen", ctrl_c)
    return Screen()


@pytest.mark.parametrize("interrupted", [interrupted_while_reading, interrupted_while_waiting])
def test_ctrl_c_leaves_the_operation_running_and_names_the_command_that_shows_it(
    interrupted: Callable[[pytest.MonkeyPatch], Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    hot.node("a")
    asked("install", "echo", "--detach")
    begin()
    # A run in the background may have been told to ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        said = refused("install", "echo", screen=interrupted(monkeypatch), code=130)
    finally:
        signal.signal(signal.SIGINT, before)
    operation = Operation.objects.get()
    assert operation.status == "processing"
    assert said.startswith(
        f"operation {operation.id} goes on; `manage.py operations show {operation.id} --follow`"
    )


def test_a_backend_is_installed_from_an_address() -> None:
    node = hot.node("a")
    asked("install", "--uri", "oci://example.org/x:1", "--name", "mine", "--node", "a", "--force", "--detach")
    operation = Operation.objects.get()
    wish = BackendRequest.of(operation)
    assert (wish.uri, wish.name, wish.force) == ("oci://example.org/x:1", "mine", True)
    assert (operation.node_id, operation.payload["all_nodes"]) == (node.id, False)


@pytest.fixture
def serving() -> list[BackendNode]:
    """Three nodes with echo; a model's only replica is on the first."""
    nodes = [hot.node(name) for name in ("a", "b", "c")]
    for node in nodes:
        NodeBackend.objects.create(node=node, name="echo", version="1.0")
    hot.replica(nodes[0], "m", backend_type="echo")
    return nodes


def waves() -> Any:
    return latest().payload.get("waves")


def test_an_upgrade_of_several_nodes_goes_in_waves(serving: list[BackendNode]) -> None:
    """The last replica of a model stops only if it is named."""
    hint = "the upgrade would stop the last replica of m; confirm with --confirm-last m"
    assert refused("upgrade", "echo") == hint
    assert not Operation.objects.exists()
    asked("upgrade", "echo", "--confirm-last", "m", "--max-unavailable", "2", "--detach")
    assert waves() == {
        "max_unavailable": 2,
        "at_once": 2,
        "canary": True,
        "pause_seconds": 0,
        "stop_at_failures": 1,
        "last_replicas": ["m"],
    }
    assert set(OperationTarget.objects.values_list("wave", flat=True)) == {0, 1}
    cancel_latest()
    asked("upgrade", "echo", "--at-once", "--detach")
    assert waves() is None
    cancel_latest()
    asked("upgrade", "echo", "--node", "b", "--detach")
    assert waves() is None, "one node is no several"
    cancel_latest()
    asked("upgrade", "echo", "--node", "b", "--node", "c", "--detach")
    assert waves()["max_unavailable"] == 1
    cancel_latest()
    asked(
        "upgrade",
        "echo",
        "--node",
        "b",
        "--node",
        "c",
        "--max-unavailable",
        "100%",
        "--pause",
        "60",
        "--detach",
    )
    assert (waves()["max_unavailable"], waves()["at_once"], waves()["pause_seconds"]) == ("100%", 2, 60)


def test_a_wave_that_fails_ends_the_command_with_what_to_choose(serving: list[BackendNode]) -> None:
    """A command does not wait for a choice that only a person can make."""
    screen = Screen(("b: queued", begin), ("b: resolving", failed("b", "no such image")))
    said = refused("upgrade", "echo", "--node", "b", "--node", "c", screen=screen)
    id = str(latest().id)[:8]
    assert said.startswith(f"operation {id} waits for a choice: wave 2 of 2: 0 of 2 nodes done, 1 failed;")
    assert said.endswith(f"`manage.py operations continue {id}` or `stop {id}`")


def test_a_delete_asks_first_and_names_nodes_and_replicas(
    serving: list[BackendNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Screen())
    assert refused("delete", "echo") == "give --yes to delete echo without a question"
    questions: list[str] = []
    monkeypatch.setattr(sys, "stdin", Screen(terminal=True))

    def no(question: str) -> str:
        questions.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", no)
    NodeModel.objects.update(in_flight=2)
    assert refused("delete", "echo") == "nothing was done"
    stops = "This stops m on a; requests in flight: 2."
    assert questions == [f"Delete echo from a, b, c. {stops} Continue? [y/N] "]
    assert refused("install", "echo", "--force") == "nothing was done"
    assert questions[1:] == [f"Reinstall echo on a, b, c. {stops} Continue? [y/N] "]
    assert not Operation.objects.exists()
    monkeypatch.setattr("builtins.input", lambda question: "y")
    asked("delete", "echo", "--node", "b", "--detach")
    assert latest().node_name == "b"
    monkeypatch.setattr("builtins.input", no)
    refused("delete", "echo", "--node", "a")
    assert questions[-1] == f"Delete echo from a. {stops} Operations pending on it: 1. Continue? [y/N] "
    asked("delete", "echo", "--node", "a", "--yes", "--detach")
    assert latest().kind == "backend_delete"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["install", "echo", "--node", "w9"], "there is no node 'w9'; `manage.py nodes list` lists them"),
        (["install", "../etc"], "backend: must be letters"),
        (["install"], "give the NAME of a backend, or --uri"),
        (["install", "echo", "--name", "x"], "--name is for --uri"),
        (["install", "echo", "--uri", "/srv/x", "--name", "x"], "give the name once"),
        (["install", "--uri", "oci://example.org/x:1"], "name: must be given with the address of an image"),
        (["install", "x", "--uri", "https://a:b@example.org/x"], "uri: must not contain a user or password"),
        (["install", "echo", "--node", "agent"], "agent is an agent node"),
        (["upgrade", "a/b"], "this is no name of a backend"),
        (["upgrade", "echo", "--max-unavailable", "0"], "max_unavailable: "),
        (["upgrade", "echo", "--at-once", "--confirm-last", "m"], "apply to waves, not to --at-once"),
        (["delete", "echo", "--yes", "--node", "new"], "node new is pending approval"),
    ],
    ids=lambda value: "-".join(value).replace("/", "") if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line(arguments: list[str], words: str) -> None:
    hot.node("a")
    hot.node("agent", node_type="agent")
    hot.node("new", status="pending", approved_at=None)
    said = refused(*arguments)
    assert words in said
    assert "\n" not in said
    assert not Operation.objects.exists()


def test_the_opposite_of_what_runs_is_carried_out_after_it() -> None:
    """Review R10."""
    hot.node("a")
    asked("install", "echo", "--node", "a", "--detach")
    begin()
    asked("delete", "echo", "--node", "a", "--yes", "--detach")
    found = latest()
    assert (found.kind, found.message) == ("backend_delete", "waits for the install of echo on a")


def test_an_upgrade_of_what_is_nowhere_fails_and_says_so() -> None:
    hot.node("a")
    said = refused("upgrade", "echo")
    assert "failed: no eligible node" in said
