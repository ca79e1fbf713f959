"""The transition table: all pairs of event and facts, and the paths that must not exist."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest

from nodes.registry.states import (
    DRAINING,
    HEALTHY,
    OFFLINE,
    PENDING,
    STATUSES,
    TRANSITIONS,
    UNHEALTHY,
    Event,
    Facts,
    Refusal,
    apply,
    status_of,
)
from tests.checks import states

EVERYTHING = list(states.everything())
REACHABLE = sorted(states.reachable(), key=str)
PENDING_NODE = Facts()
HEALTHY_NODE = Facts(approved=True)


def after(facts: Facts, *events: Event) -> Facts:
    """The facts after these events; a refused one fails the test."""
    for event in events:
        result = apply(event, facts)
        assert isinstance(result, Facts), (event, result)
        facts = result
    return facts


def allowed(event: Event) -> list[tuple[Facts, Facts]]:
    """Every pair of facts before and after `event`, also facts that never come about."""
    pairs = [(facts, apply(event, facts)) for facts in EVERYTHING]
    return [(before, result) for before, result in pairs if isinstance(result, Facts)]


def changing(fact: str, before: object, result: object) -> set[Event]:
    """The events that turn `fact` from `before` into `result`."""
    return {
        event
        for event in Event
        for old, new in allowed(event)
        if (getattr(old, fact), getattr(new, fact)) == (before, result)
    }


def test_every_event_has_a_row_and_every_row_a_sentence() -> None:
    assert set(TRANSITIONS) == set(Event)
    assert all(row.sentence.endswith(".") and row.allowed for row in TRANSITIONS.values())


@pytest.mark.rule("R1.2")
def test_status_is_the_first_that_holds() -> None:
    """Pending, offline, draining, unhealthy, healthy, in this order, for every combination of facts."""
    for facts in EVERYTHING:
        if not facts.approved:
            expected = "pending"
        elif facts.offline:
            expected = "offline"
        elif facts.drained:
            expected = "draining"
        elif facts.unhealthy:
            expected = "unhealthy"
        else:
            expected = "healthy"
        assert status_of(facts) == expected, facts


@pytest.mark.parametrize("event", Event)
def test_all_pairs_are_allowed_or_refused_with_the_state_named(event: Event) -> None:
    """Every event with every combination of facts: the table decides alone, and a refusal says why."""
    row = TRANSITIONS[event]
    for facts in EVERYTHING:
        result, status = apply(event, facts), status_of(facts)
        if status in row.allowed and row.guard(facts):
            assert result == row.effect(facts)
        else:
            assert isinstance(result, Refusal)
            assert status in result.reason
            assert status not in row.allowed or row.guard_reason in result.reason


@pytest.mark.parametrize("event", Event)
def test_what_has_happened_may_happen_again_and_changes_nothing(event: Event) -> None:
    for _, result in allowed(event):
        again = apply(event, result)
        assert isinstance(again, Refusal) or again == result


# From which reachable status to which; written by hand from R1.10 to R1.21 and the health pass.
EXPECTED = {
    Event.REGISTERED: {
        PENDING: {PENDING},
        OFFLINE: {DRAINING, HEALTHY},
        DRAINING: {DRAINING, HEALTHY},
        UNHEALTHY: {HEALTHY},
        HEALTHY: {HEALTHY},
    },
    Event.AUTO_APPROVED: {PENDING: {OFFLINE, DRAINING, UNHEALTHY, HEALTHY}},
    Event.APPROVED: {PENDING: {OFFLINE, DRAINING, UNHEALTHY, HEALTHY}},
    Event.REJECTED: {PENDING: {PENDING}},
    Event.DRAINED: {
        PENDING: {PENDING},
        OFFLINE: {OFFLINE},
        DRAINING: {DRAINING},
        UNHEALTHY: {DRAINING},
        HEALTHY: {DRAINING},
    },
    Event.DRAINED_ITSELF: {
        PENDING: {PENDING},
        OFFLINE: {OFFLINE},
        DRAINING: {DRAINING},
        UNHEALTHY: {DRAINING},
        HEALTHY: {DRAINING},
    },
    Event.DRAIN_ENDED: {DRAINING: {DRAINING}},
    Event.RESUMED: {OFFLINE: {OFFLINE}, DRAINING: {HEALTHY}, UNHEALTHY: {HEALTHY}},
    Event.RESUMED_ITSELF: {DRAINING: {UNHEALTHY, HEALTHY}},
    Event.DEACTIVATED: {
        PENDING: {PENDING},
        OFFLINE: {OFFLINE},
        DRAINING: {OFFLINE},
        UNHEALTHY: {OFFLINE},
        HEALTHY: {OFFLINE},
    },
    Event.FELL_SILENT: {DRAINING: {OFFLINE}, UNHEALTHY: {OFFLINE}, HEALTHY: {OFFLINE}},
    Event.HEARD_AGAIN: {PENDING: {PENDING}, OFFLINE: {DRAINING, UNHEALTHY, HEALTHY}},
    Event.MARKED_UNHEALTHY: {
        PENDING: {PENDING},
        OFFLINE: {OFFLINE},
        DRAINING: {DRAINING},
        UNHEALTHY: {UNHEALTHY},
        HEALTHY: {UNHEALTHY},
    },
    Event.MARKED_HEALTHY: {
        PENDING: {PENDING},
        OFFLINE: {OFFLINE},
        DRAINING: {DRAINING},
        UNHEALTHY: {HEALTHY},
    },
    Event.REVOKED: {status: {PENDING} for status in STATUSES},
    Event.HANDED_OVER: {
        PENDING: {PENDING},
        OFFLINE: {OFFLINE},
        DRAINING: {OFFLINE},
        UNHEALTHY: {OFFLINE},
        HEALTHY: {OFFLINE},
    },
    Event.DEREGISTERED: {status: {status} for status in STATUSES},
}


@pytest.mark.rule(
    "R1.10", "R1.11", "R1.12", "R1.13", "R1.14", "R1.15", "R1.17", "R1.18", "R1.19", "R1.20", "R1.21", "R5.4"
)
@pytest.mark.parametrize("event", Event)
def test_from_which_status_to_which(event: Event) -> None:
    """The table of §1B with its "Port:" lines."""
    seen: dict[str, set[str]] = {}
    for facts in REACHABLE:
        result = apply(event, facts)
        if isinstance(result, Facts):
            seen.setdefault(status_of(facts), set()).add(status_of(result))
    assert seen == EXPECTED[event]


def test_facts_that_contradict_each_other_never_come_about() -> None:
    """An approved node was neither rejected nor revoked, and somebody can speak for it."""
    contradictions = [
        facts for facts in REACHABLE if facts.approved and (facts.rejected or facts.revoked)
    ] + [facts for facts in REACHABLE if facts.approved and not facts.identified]
    assert contradictions == []


@pytest.mark.parametrize(
    ("fact", "before", "result", "events"),
    [
        ("approved", False, True, {Event.APPROVED, Event.AUTO_APPROVED}),
        ("approved", True, False, {Event.REVOKED}),
        ("rejected", True, False, {Event.APPROVED}),
        ("revoked", True, False, {Event.APPROVED}),
        ("identified", True, False, {Event.REVOKED}),
        ("identified", False, True, {Event.REGISTERED, Event.HANDED_OVER}),
        ("drained", "admin", "", {Event.RESUMED}),
        ("drained", "admin", "own", set()),
        ("drained", "own", "", {Event.RESUMED, Event.RESUMED_ITSELF, Event.REGISTERED}),
        ("drained", "own", "admin", {Event.DRAINED}),
        ("offline", "left", "", {Event.REGISTERED}),
        ("offline", "left", "silent", {Event.RESUMED}),
        ("offline", "silent", "", {Event.REGISTERED, Event.HEARD_AGAIN}),
        ("offline", "", "silent", {Event.FELL_SILENT}),
        ("unhealthy", True, False, {Event.REGISTERED, Event.RESUMED, Event.MARKED_HEALTHY}),
    ],
)
def test_only_these_events_change_a_fact(
    fact: str, before: object, result: object, events: set[Event]
) -> None:
    """Over all facts, reachable or not: who may approve, end a drain, bring a node back."""
    assert changing(fact, before, result) == events


def test_a_no_of_an_admin_is_not_overruled_by_auto_approval() -> None:
    cases: tuple[dict[str, Any], ...] = ({"rejected": True}, {"revoked": True}, {"identified": False})
    for said in cases:
        facts = replace(PENDING_NODE, **said)
        assert isinstance(apply(Event.AUTO_APPROVED, facts), Refusal)


@pytest.mark.rule("R5.6", "R1.18")
def test_pending_offline_healthy() -> None:
    """Impossible: without an approval the node always stays pending."""
    approving = {Event.APPROVED, Event.AUTO_APPROVED}
    found, waiting = {PENDING_NODE}, [PENDING_NODE]
    while waiting:
        facts = waiting.pop()
        assert status_of(facts) == PENDING
        for result in (apply(event, facts) for event in Event if event not in approving):
            if isinstance(result, Facts) and result not in found:
                found.add(result)
                waiting.append(result)
    assert any(facts.offline for facts in found)
    assert isinstance(apply(Event.FELL_SILENT, PENDING_NODE), Refusal)


@pytest.mark.rule("R1.18")
def test_resume_on_a_pending_node() -> None:
    """Impossible: refused, in every other state."""
    for facts in EVERYTHING:
        if not facts.approved:
            for event in (Event.RESUMED, Event.RESUMED_ITSELF):
                assert apply(event, facts) == Refusal("the node is pending")


@pytest.mark.rule("R1.14")
def test_a_drain_healed_by_re_registration() -> None:
    """Impossible for an admin's drain, also after silence, a goodbye and the worker's own drain."""
    drained = after(HEALTHY_NODE, Event.DRAINED_ITSELF, Event.DRAINED)
    ways: list[tuple[Event, ...]] = [
        (Event.REGISTERED,),
        (Event.FELL_SILENT, Event.REGISTERED),
        (Event.FELL_SILENT, Event.HEARD_AGAIN),
        (Event.DRAINED_ITSELF, Event.DEACTIVATED, Event.REGISTERED),
        (Event.DRAIN_ENDED, Event.DEACTIVATED, Event.REGISTERED, Event.REGISTERED),
        (Event.MARKED_UNHEALTHY, Event.MARKED_HEALTHY),
        (Event.HANDED_OVER, Event.REGISTERED),
        (Event.REVOKED, Event.REGISTERED, Event.APPROVED),
    ]
    assert [status_of(after(drained, *way)) for way in ways] == [DRAINING] * len(ways)
    assert isinstance(apply(Event.RESUMED_ITSELF, drained), Refusal)
    assert status_of(after(drained, Event.RESUMED)) == HEALTHY


@pytest.mark.rule("R1.14", "R1.19")
def test_a_workers_own_drain_ends_with_its_next_registration() -> None:
    assert status_of(after(HEALTHY_NODE, Event.DRAINED_ITSELF)) == DRAINING
    gone = after(HEALTHY_NODE, Event.DRAINED_ITSELF, Event.DEACTIVATED)
    assert status_of(gone) == OFFLINE
    assert after(gone, Event.REGISTERED) == HEALTHY_NODE


@pytest.mark.rule("R5.5", "R5.7")
def test_a_shutdown_that_flips_back_within_15_s() -> None:
    """Impossible: no beat and no health pass brings back a node that has left."""
    gone = after(HEALTHY_NODE, Event.DRAINED_ITSELF, Event.DEACTIVATED)
    assert isinstance(apply(Event.HEARD_AGAIN, gone), Refusal)
    assert isinstance(apply(Event.FELL_SILENT, gone), Refusal)
    back = [event for event in Event if status_of(_maybe(event, gone)) != OFFLINE]
    assert back == [Event.REGISTERED, Event.REVOKED]


def _maybe(event: Event, facts: Facts) -> Facts:
    result = apply(event, facts)
    return facts if isinstance(result, Refusal) else result


@pytest.mark.rule("R5.3", "R5.4")
def test_a_silent_draining_node_goes_offline() -> None:
    facts = after(HEALTHY_NODE, Event.DRAINED, Event.FELL_SILENT)
    assert status_of(facts) == OFFLINE
    assert status_of(after(facts, Event.HEARD_AGAIN)) == DRAINING


def test_the_document_is_what_the_table_says() -> None:
    """`python -m tests.checks.states` writes it."""
    assert states.DOCUMENT.read_text(encoding="utf-8") == states.document()


def test_the_document_names_every_event_and_fact() -> None:
    text = states.document()
    assert all(f"| `{event}` |" in text for event in Event)
    assert all(f"`{field.name}`" in text for field in fields(Facts))
    assert all(f"{left} --> {right}" in text for left, right in product(["offline"], ["healthy", "draining"]))
