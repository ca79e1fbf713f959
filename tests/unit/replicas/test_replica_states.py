"""The table of an engine's life, its document, and the check that one package writes it."""

import pytest

from nodes.models.replica import LOADING_PHASES, STATE_BY_PHASE, OwnerKind, Phase, PhaseReason
from nodes.replicas.states import PHASES, TRANSITIONS, ReplicaEvent
from tests.checks import replicas


def test_every_phase_has_rules_and_every_event_a_row() -> None:
    assert set(PHASES) == set(STATE_BY_PHASE) == set(Phase)
    assert set(TRANSITIONS) == set(ReplicaEvent)


def test_every_phase_but_serving_has_an_owner_and_a_deadline() -> None:
    for phase, rules in PHASES.items():
        assert bool(rules.owners) == bool(rules.deadline) == (phase != Phase.SERVING)
        assert bool(rules.reasons) == (phase not in (*LOADING_PHASES, Phase.SERVING))
        assert rules.ends


def test_every_phase_is_reached_and_left_again() -> None:
    targets = {target for row in TRANSITIONS.values() for target in row.follows.values()}
    assert targets == {*Phase, None}
    for phase in Phase:
        left = {row.follows[phase] for row in TRANSITIONS.values() if phase in row.follows}
        assert left - {phase}, f"nothing moves {phase} on"


def test_no_event_ends_an_engine_that_may_run_but_a_confirmation_or_a_removed_node() -> None:
    """What may have an engine is only ever stopped, departed, or confirmed."""
    engines = set(Phase) - {Phase.RESERVED, Phase.STAGING}
    ends = {
        event for event, row in TRANSITIONS.items() if any(row.follows.get(p, p) is None for p in engines)
    }
    assert ends == {ReplicaEvent.CONFIRMED, ReplicaEvent.NODE_FORGOTTEN}


def test_only_a_load_leads_to_serving_or_what_has_not_been_stopped_returns_to_it() -> None:
    sources = {
        source
        for row in TRANSITIONS.values()
        for source, target in row.follows.items()
        if target == Phase.SERVING
    }
    assert sources == {LOADING_PHASES[-1], Phase.DRAINING}


def test_the_document_is_up_to_date() -> None:
    assert replicas.DOCUMENT.read_text(encoding="utf-8") == replicas.document()


def test_one_package_writes_the_life_of_a_replica() -> None:
    assert list(replicas.strays()) == []


@pytest.mark.parametrize(
    "source",
    [
        "NodeModel.objects.filter(pk=1).update(phase='serving')",
        "NodeModel.engines.all().delete()",
        "node.replicas.all().update(in_flight=0)",
        "row.owner_id = None",
        "STATEMENT = 'UPDATE node_models SET in_flight = 0'",
        "row.phase = 'serving'; row.save()",
        "row.id, row.reason = 1, 'lost'",
        "rows.update(phase='serving')",
        "claim_rows(rows, claimed_until=None)",
        "kit_rows.claim_rows(NodeModel.engines.all(), checked_at=None)",
        "STATEMENT = 'UPDATE ONLY node_models SET in_flight = 0'",
        "STATEMENT = 'TRUNCATE public.\"node_models\"'",
        "STATEMENT = f'WITH a AS (DELETE FROM node_models) SELECT {1}'",
    ],
)
def test_a_write_elsewhere_is_found(source: str) -> None:
    assert len(list(replicas.found_in(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "NodeModel.objects.filter(pk=1).count()",
        "SELECT = 'SELECT 1 FROM node_models'",
        "row.name = ''",
        "self.deadline = 1",
        "claim_rows(nodes, inventory_due_at=None)",
    ],
)
def test_reading_is_free(source: str) -> None:
    assert list(replicas.found_in(source)) == []


def test_reasons_and_owners_are_used() -> None:
    assert {reason for rules in PHASES.values() for reason in rules.reasons} == set(PhaseReason)
    assert {owner for rules in PHASES.values() for owner in rules.owners} == set(OwnerKind)
