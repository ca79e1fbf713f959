"""The rows of the upgrade check: who asked, who is at it, and what the galleries offer.

A request counts `asked` up; a check answers all requests from before its claim, so any number of requests
while one runs become one more. A claim is for a time: another controller takes over that of a dead one, and
what the first one finds afterwards is thrown away. A NOTIFY on `CHANNEL` leaves with every change.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Greatest

from localai_cluster import names
from nodes.backends.upgrade_rules import Offered
from nodes.models import BackendOffer, UpgradeCheck
from operations.changes import events

CHANNEL = "cluster_upgrades"
"""NOTIFY channel: a check is wanted, or what is installed or offered has changed."""
CLAIMED_FOR = 180.0
RETRY_AFTER = 300.0
"""Seconds after which a check that could not read every gallery is made again."""
_REASON = 1000
"""Characters kept of why a gallery could not be read; it may quote the gallery."""
_ROW = UpgradeCheck.objects.filter(pk=UpgradeCheck.ONLY)
_UNREAD: Mapping[str, Any] = {
    "revision": 0,
    "checked_at": None,
    "asked": 0,
    "answered": 0,
    "followed": 0,
    "problems": {},
    "galleries": "",
}


@dataclass(frozen=True)
class CheckClaim:
    """A check that this caller makes, and up to which request it answers."""

    owner: str
    asked: int


@dataclass(frozen=True)
class Standing:
    """How the check stands."""

    revision: int
    checked_at: datetime | None
    asked: int
    answered: int
    followed: int
    problems: Mapping[str, str]
    galleries: str

    @property
    def checking(self) -> bool:
        """Whether a check is due or being made."""
        return self.asked > self.answered


def standing() -> Standing:
    """One query."""
    return Standing(**(_ROW.values(*_UNREAD).first() or _UNREAD))


def ask() -> None:
    """A check is wanted, with what the galleries offer now."""
    _ask()


def installed_changed() -> None:
    """Some node has another list than before: pages read it again, and what is new there is checked."""
    _ask(revision=F("revision") + 1)


def _ask(**columns: Any) -> None:
    with transaction.atomic():
        if not _ROW.update(asked=F("asked") + 1, **columns):
            # The first one; another process may be making the row at this moment.
            UpgradeCheck.objects.bulk_create([UpgradeCheck()], ignore_conflicts=True)
            _ROW.update(asked=F("asked") + 1, **columns)
        events.notify(CHANNEL, "")


def claim(owner: str, *, now: datetime) -> CheckClaim | None:
    """The check that is due, for this caller alone; None if there is none or somebody is at it.

    One that is made again counts as asked for: what it finds is new, and is followed (`followed`).
    """
    again = ~Q(problems={}) & Q(checked_at__lte=now - timedelta(seconds=RETRY_AFTER))
    due = _ROW.filter(Q(asked__gt=F("answered")) | again)
    free = due.filter(Q(claimed_until__isnull=True) | Q(claimed_until__lte=now))
    with transaction.atomic():
        until = now + timedelta(seconds=CLAIMED_FOR)
        asked = Greatest("asked", F("answered") + 1)
        if not free.update(claimed_by=owner, claimed_until=until, asked=asked):
            return None
        return CheckClaim(owner, _ROW.values_list("asked", flat=True).get())


def finish(
    mine: CheckClaim,
    found: Mapping[str, Offered],
    *,
    problems: Mapping[str, str],
    galleries: str,
    now: datetime,
) -> bool:
    """Keeps what a check found; answers False if somebody has taken it over.

    Offers of galleries that could not be read stay: what was known yesterday is better than nothing.
    """
    with transaction.atomic():
        row = _ROW.select_for_update(no_key=True).first()
        if row is None or row.claimed_by != mine.owner:
            return False
        row.revision += _keep(found, forget=not problems)
        row.answered = max(row.answered, mine.asked)
        row.claimed_by, row.claimed_until = "", None
        row.problems = {names.plain(name): names.plain(why[:_REASON]) for name, why in problems.items()}
        row.checked_at, row.galleries = now, galleries
        row.save()
        events.notify(CHANNEL, "")
    return True


def followed(answered: int) -> None:
    """Automatic upgrades were made of what the checks up to this request have found."""
    _ROW.filter(followed__lt=answered).update(followed=answered)


def offers() -> dict[str, Offered]:
    """What the galleries offer, by folded name; one query."""
    rows = BackendOffer.objects.defer("automatic_to", "automatic_nodes")
    return {row.name: offer_of(row) for row in rows}


def offer_of(row: BackendOffer) -> Offered:
    """What the row says."""
    return Offered(row.version, row.uri, (row.digest, *row.builds) if row.digest else ())


def _keep(found: Mapping[str, Offered], *, forget: bool) -> bool:
    """Brings the offers to `found`; answers whether anything changed."""
    known = offers()
    gone = [name for name in known if forget and name not in found]
    changed = [_row(name, offer) for name, offer in found.items() if known.get(name) != offer]
    if gone:
        BackendOffer.objects.filter(pk__in=gone).delete()
    if changed:
        columns = ["version", "uri", "digest", "builds"]
        BackendOffer.objects.bulk_create(
            changed, update_conflicts=True, unique_fields=["name"], update_fields=columns
        )
    return bool(gone or changed)


def _row(name: str, offer: Offered) -> BackendOffer:
    return BackendOffer(
        name=name,
        version=offer.version,
        uri=offer.uri,
        digest="".join(offer.digests[:1]),
        builds=offer.digests[1:],
    )
