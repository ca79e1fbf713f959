"""Decision records of the replica pass: replicas to load or retire, and demands that cannot be satisfied.

They are written before any action, for all rules at once. A refused action gets a record of its own
afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from nodes.decisions import decision_log, fleet_snapshots, scale_snapshots
from nodes.decisions.decision_log import Decided
from nodes.decisions.fleet_snapshots import Seen
from nodes.models import DecisionKind
from nodes.placement.explain import LONGEST_SENTENCE, Ending, cut
from nodes.scheduling.snapshot import ClearFlags, Demand, EndPressure, Fleet, Ruling, Unsatisfiable


def keep(
    rulings: Iterable[Ruling], fleet: Fleet, demands: Mapping[str, Demand], now: datetime, *, tick: bool
) -> Seen | None:
    """Record the rulings that decide anything; a constant number of statements."""
    decided = [(ruling, ending) for ruling in rulings if (ending := outcome(ruling)) is not None]
    if not decided:
        return None
    demands_by_model = {ruling.model: demands[ruling.model] for ruling, _ in decided}
    snapshot = fleet_snapshots.remember(
        scale_snapshots.sections(fleet, demands_by_model, now, tick=tick), now=now
    )
    records = (_new_record(ruling.model, snapshot, ending, sentence(ruling)) for ruling, ending in decided)
    decision_log.record_all(records, now=now)
    return snapshot


def keep_refused(
    rulings_before: Iterable[Ruling], rulings_after: Sequence[Ruling], snapshot: Seen | None, now: datetime
) -> None:
    """Record the refused rulings, with the reason of the refusal."""
    refused = [
        (before, after)
        for before, after in zip(rulings_before, rulings_after, strict=True)
        if after is not before
    ]
    if refused:
        records = (
            _new_record(before.model, snapshot, Ending.REFUSED, sentence(after), decided=sentence(before))
            for before, after in refused
        )
        decision_log.record_all(records, now=now)


def outcome(ruling: Ruling) -> Ending | None:
    """Return the ending that the ruling decides; None if everything stays as it is."""
    decisions = [action for action in ruling.actions if not isinstance(action, ClearFlags | EndPressure)]
    if not decisions:
        return None
    return Ending.WAITING if all(isinstance(action, Unsatisfiable) for action in decisions) else Ending.SCALED


def sentence(ruling: Ruling) -> str:
    """Return the reason of the ruling, cut to the length of the record."""
    return cut(ruling.reason, LONGEST_SENTENCE)


def _new_record(model: str, snapshot: Seen | None, ending: Ending, reason: str, **facts: str) -> Decided:
    return Decided(
        model, None, decision_log.without_fleet(ending, reason, **facts), snapshot, DecisionKind.SCALE
    )
