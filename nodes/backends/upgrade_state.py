"""The rows of the upgrade check: its requests, the controller that makes it, and what the galleries offer.

A request increments `requested`; a check covers all requests from before its claim, so any number of requests
during a check cause one more check. A claim expires: then another controller makes the check, and a late
result of the first controller is discarded. Every change sends a NOTIFY on `CHANNEL`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Greatest

from localai_cluster.kit import names
from nodes.backends.installed import Offered
from nodes.models import BackendOffer, UpgradeCheck
from operations.changes import events

CHANNEL = "cluster_upgrades"
"""NOTIFY channel: a check was requested, or installed or offered backends have changed."""
CLAIM_SECONDS = 180.0
"""Seconds after which the claim of a check expires."""
RETRY_AFTER = 300.0
"""Seconds after which a check that could not read every gallery is repeated."""
_MAX_REASON_LENGTH = 1000
"""Maximum length of the stored reason why a gallery could not be read; it may quote the gallery."""
_CHECK_ROW = UpgradeCheck.objects.filter(pk=UpgradeCheck.ONLY)


@dataclass(frozen=True)
class CheckClaim:
    """The claim of a check by `owner`, and the number of the last request that the check covers."""

    owner: str
    requested: int


@dataclass(frozen=True)
class UpgradeCheckState:
    """State of the upgrade check."""

    revision: int = 0
    checked_at: datetime | None = None
    requested: int = 0
    completed: int = 0
    processed: int = 0
    problems: Mapping[str, str] = field(default_factory=dict)
    galleries: str = ""

    @property
    def checking(self) -> bool:
        """True if a check is due or running."""
        return self.requested > self.completed


def read_state() -> UpgradeCheckState:
    """Read the state of the upgrade check; one query."""
    return UpgradeCheckState(**(_CHECK_ROW.values(*UpgradeCheckState.__dataclass_fields__).first() or {}))


def request_check() -> None:
    """Request a check."""
    _request()


def request_check_after_change() -> None:
    """Request a check and notify pages, because the list of a node has changed."""
    _request(revision=F("revision") + 1)


def _request(**columns: Any) -> None:
    with transaction.atomic():
        if not _CHECK_ROW.update(requested=F("requested") + 1, **columns):
            # The first request; another process may create the row at this moment.
            UpgradeCheck.objects.bulk_create([UpgradeCheck()], ignore_conflicts=True)
            _CHECK_ROW.update(requested=F("requested") + 1, **columns)
        events.notify(CHANNEL, "")


def claim(owner: str, *, now: datetime) -> CheckClaim | None:
    """Claim the due check; return None if no check is due or another controller is making it.

    A repeated check counts as requested, so that its new offers are processed (`processed`).
    """
    is_incomplete = ~Q(problems={}) & Q(checked_at__lte=now - timedelta(seconds=RETRY_AFTER))
    due = _CHECK_ROW.filter(Q(requested__gt=F("completed")) | is_incomplete)
    free = due.filter(Q(claimed_until__isnull=True) | Q(claimed_until__lte=now))
    with transaction.atomic():
        until = now + timedelta(seconds=CLAIM_SECONDS)
        requested = Greatest("requested", F("completed") + 1)
        if not free.update(claimed_by=owner, claimed_until=until, requested=requested):
            return None
        return CheckClaim(owner, _CHECK_ROW.values_list("requested", flat=True).get())


def finish(
    own_claim: CheckClaim,
    new_offers: Mapping[str, Offered],
    *,
    problems: Mapping[str, str],
    galleries: str,
    now: datetime,
) -> bool:
    """Store the offers of a check; return False if another controller has claimed the check.

    Earlier offers of galleries that could not be read stay.
    """
    with transaction.atomic():
        row = _CHECK_ROW.select_for_update(no_key=True).first()
        if row is None or row.claimed_by != own_claim.owner:
            return False
        row.revision += _store_offers(new_offers, forget=not problems)
        row.completed = max(row.completed, own_claim.requested)
        row.claimed_by, row.claimed_until = "", None
        row.problems = {
            names.to_single_line(name): names.to_single_line(reason[:_MAX_REASON_LENGTH])
            for name, reason in problems.items()
        }
        row.checked_at, row.galleries = now, galleries
        row.save()
        events.notify(CHANNEL, "")
    return True


def record_processed(completed: int) -> None:
    """Record that automatic upgrades were created for the checks up to this request."""
    _CHECK_ROW.filter(processed__lt=completed).update(processed=completed)


def offers() -> dict[str, Offered]:
    """Return the galleries' offers by case-folded name; one query."""
    rows = BackendOffer.objects.defer("automatic_to", "automatic_nodes")
    return {row.name: offer_of(row) for row in rows}


def offer_of(row: BackendOffer) -> Offered:
    return Offered(row.version, row.uri, (row.digest, *row.builds) if row.digest else ())


def _store_offers(desired: Mapping[str, Offered], *, forget: bool) -> bool:
    """Change the stored offers to `desired`; return True if anything changed."""
    current = offers()
    withdrawn_names = [name for name in current if forget and name not in desired]
    changed = [_row(name, offer) for name, offer in desired.items() if current.get(name) != offer]
    if withdrawn_names:
        BackendOffer.objects.filter(pk__in=withdrawn_names).delete()
    if changed:
        columns = ["version", "uri", "digest", "builds"]
        BackendOffer.objects.bulk_create(
            changed, update_conflicts=True, unique_fields=["name"], update_fields=columns
        )
    return bool(withdrawn_names or changed)


def _row(name: str, offer: Offered) -> BackendOffer:
    return BackendOffer(
        name=name,
        version=offer.version,
        uri=offer.uri,
        digest="".join(offer.digests[:1]),
        builds=offer.digests[1:],
    )
