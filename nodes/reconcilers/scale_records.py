"""The record of what the replica pass decides: which replicas are loaded or retired, and what cannot be had.

It is kept before anything is done, for all rules at once. What is refused afterwards has a record of its own.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from nodes.models import DecisionKind
from nodes.placement.explain import LONGEST_SENTENCE, Ending, cut
from nodes.replicas import fleet_log, reasons
from nodes.replicas.fleet_log import Seen
from nodes.replicas.reasons import Decided
from nodes.scheduling import coded
from nodes.scheduling.picture import ClearFlags, Demand, EndPressure, Fleet, Ruling, Unsatisfiable


def keep(
    rulings: Iterable[Ruling], fleet: Fleet, demands: Mapping[str, Demand], now: datetime, *, tick: bool
) -> Seen | None:
    """Keeps the rulings that decide anything; a constant number of statements."""
    decided = [(ruling, ending) for ruling in rulings if (ending := outcome(ruling)) is not None]
    if not decided:
        return None
    about = {ruling.model: demands[ruling.model] for ruling, _ in decided}
    seen = fleet_log.remember(coded.sections(fleet, about, now, tick=tick), now=now)
    every = (_decided(ruling.model, seen, ending, sentence(ruling)) for ruling, ending in decided)
    reasons.record_all(every, now=now)
    return seen


def keep_refused(planned: Iterable[Ruling], done: Sequence[Ruling], seen: Seen | None, now: datetime) -> None:
    """Keeps what was refused of it, with the words of the refusal."""
    refused = [(before, after) for before, after in zip(planned, done, strict=True) if after is not before]
    if refused:
        every = (
            _decided(before.model, seen, Ending.REFUSED, sentence(after), decided=sentence(before))
            for before, after in refused
        )
        reasons.record_all(every, now=now)


def outcome(ruling: Ruling) -> Ending | None:
    """What it decides; None if everything stays as it is."""
    deeds = [action for action in ruling.actions if not isinstance(action, ClearFlags | EndPressure)]
    if not deeds:
        return None
    return Ending.WAITING if all(isinstance(one, Unsatisfiable) for one in deeds) else Ending.SCALED


def sentence(ruling: Ruling) -> str:
    """Why, in the words of the rule."""
    return cut(ruling.reason, LONGEST_SENTENCE)


def _decided(model: str, seen: Seen | None, ending: Ending, said: str, **facts: str) -> Decided:
    return Decided(model, None, reasons.without_fleet(ending, said, **facts), seen, DecisionKind.SCALE)
