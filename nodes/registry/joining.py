"""Join tokens: created by an administrator, shown once, spent by the machines that register with them.

A token replaces the registration token, for a limited time and number of new nodes. It does not authenticate
a node: the worker's own secret does that, and an administrator approves it. A worker whose secret is bound to
a node keeps its token in its environment, so it may register again even after the token has expired. This
module is the only writer of `join_tokens`.
"""

import logging
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Exists, F, OuterRef

from localai_cluster.accounts import audit
from localai_cluster.accounts.actors import Actor
from localai_cluster.accounts.audit import Change
from localai_cluster.accounts.principals import hash_secret
from localai_cluster.kit import errors, names
from nodes.models import BackendNode, JoinToken
from nodes.registry.identity import WrongCredential, is_bound

log = logging.getLogger(__name__)

TOKEN_PREFIX = "join-"
MIN_LIFETIME, MAX_LIFETIME, DEFAULT_LIFETIME = 60, 7 * 86400, 3600
"""Minimum, maximum and default validity of a token in seconds."""
MAX_USES = 1000
MAX_NOTE_LENGTH = 200
_TOKEN_PATTERN = re.compile(TOKEN_PREFIX + r"[0-9a-f]{64}\Z")


class TokenState(StrEnum):
    """Whether a join token admits new nodes and, if not, why."""

    USABLE = "usable"
    REVOKED = "revoked"
    EXPIRED = "expired"
    USED_UP = "used_up"


class TokenRefused(errors.NotAuthenticated):
    """The join token exists, but no longer admits new nodes."""


def is_join_token(credential: str) -> bool:
    """Return True if the credential has the form of a join token."""
    return _TOKEN_PATTERN.match(credential) is not None


def state(token: JoinToken, now: datetime) -> TokenState:
    """Return whether the token is usable at `now`, or why not."""
    if token.revoked_at is not None:
        return TokenState.REVOKED
    if token.expires_at <= now:
        return TokenState.EXPIRED
    return TokenState.USED_UP if token.uses >= token.max_uses else TokenState.USABLE


def make(
    *, actor: Actor, now: datetime, note: str = "", lifetime: int = DEFAULT_LIFETIME, uses: int = 1
) -> tuple[JoinToken, str]:
    """Create a join token that is valid for `lifetime` seconds; return the row and the token's text.

    Only its hash is stored. Raises InvalidInput with the name of a field that is out of bounds.
    """
    if not MIN_LIFETIME <= lifetime <= MAX_LIFETIME:
        _refuse("lifetime_seconds", f"must be a whole number from {MIN_LIFETIME} to {MAX_LIFETIME}")
    if not 1 <= uses <= MAX_USES:
        _refuse("uses", f"must be a whole number from 1 to {MAX_USES}")
    _check_note(note)
    plain = TOKEN_PREFIX + secrets.token_hex(32)
    with transaction.atomic():
        row = JoinToken.objects.create(
            token_hash=hash_secret(plain),
            note=note.strip(),
            created_at=now,
            created_by=str(actor),
            expires_at=now + timedelta(seconds=lifetime),
            max_uses=uses,
        )
        detail = f"for {lifetime} s and {uses} nodes"
        audit.record(Change("join_token.made", f"join token {row}", str(row.pk), detail), at=now)
    log.info("join token %s made by %s for %d s and %d nodes", row.pk, actor, lifetime, uses)
    return row, plain


def _check_note(note: str) -> None:
    if len(note) > MAX_NOTE_LENGTH:
        _refuse("note", f"exceeds {MAX_NOTE_LENGTH} characters")
    names.check_text(note, "note")


def _refuse(field: str, complaint: str) -> None:
    raise errors.InvalidInput(f"{field} {complaint}", field=field)


def check_change(token_id: UUID, changes: Mapping[str, Any], now: datetime) -> None:
    """Lock the token until the transaction ends and check changes of `note`, `expires_at` or `max_uses`.

    Raises NotFound, Conflict if the token is revoked, InvalidInput with the name of the field.
    """
    row = JoinToken.objects.select_for_update().filter(pk=token_id).first()
    if row is None:
        raise errors.NotFound("join token not found")
    if row.revoked_at is not None:
        raise errors.Conflict("this join token was revoked")
    _check_note(changes.get("note", row.note))
    if "expires_at" in changes and not now < changes["expires_at"] <= now + timedelta(seconds=MAX_LIFETIME):
        _refuse(
            "expires_at", f"must be in the next {MAX_LIFETIME // 86400} days; to end a token now, revoke it"
        )
    least = max(row.uses, 1)
    if not least <= changes.get("max_uses", least) <= MAX_USES:
        _refuse("max_uses", f"must be a whole number from {least} to {MAX_USES}")


def change(token_id: UUID, changes: Mapping[str, Any], *, actor: Actor, now: datetime) -> None:
    """Write the changes, which may make an expired token usable again. Raises as `check_change`.

    Django's admin calls this function; the admin's log is part of the audit.
    """
    with transaction.atomic():
        check_change(token_id, changes, now)
        JoinToken.objects.filter(pk=token_id).update(**changes)
    log.info("join token %s changed by %s: %s", token_id, actor, ", ".join(sorted(changes)))


def revoke(token_id: UUID, *, actor: Actor, now: datetime) -> None:
    """Revoke the token: it admits no new node. A repeated call changes nothing. Raises NotFound."""
    rows = JoinToken.objects.filter(pk=token_id)
    with transaction.atomic():
        revoked = rows.filter(revoked_at=None).update(revoked_at=now, revoked_by=str(actor))
        if revoked:
            audit.record(Change("join_token.revoked", f"join token {rows.get()}", str(token_id)), at=now)
            log.info("join token %s revoked by %s", token_id, actor)
    if not revoked and not rows.exists():
        raise errors.NotFound("join token not found")


def recognise(token: str, fingerprint: str, now: datetime) -> JoinToken:
    """Return the row of the join token that a registering worker has sent.

    `fingerprint` is that of the worker's own secret, "" if it sent none. Raises WrongCredential for an
    unknown token. Raises TokenRefused if the token no longer admits new nodes, unless the secret belongs to a
    node that has not been revoked. One or two queries.
    """
    row = JoinToken.objects.filter(token_hash=hash_secret(token)).first() if is_join_token(token) else None
    if row is None:
        raise WrongCredential("invalid registration token")
    token_state = state(row, now)
    if token_state != TokenState.USABLE and not is_bound(fingerprint):
        raise _token_refusal(row, token_state)
    return row


def _token_refusal(row: JoinToken, token_state: TokenState) -> TokenRefused:
    admitted = f"{row.uses} of {row.max_uses} nodes"
    reasons = {
        TokenState.REVOKED: "this join token was revoked",
        TokenState.EXPIRED: f"this join token expired at {row.expires_at:%Y-%m-%d %H:%M:%S}Z",
        TokenState.USED_UP: f"this join token is used up: it has admitted {admitted}",
    }
    return TokenRefused(f"{reasons.get(token_state, 'this join token has just been used')}; make another one")


def spend_uses(newcomers: Iterable[tuple[JoinToken, str]], now: datetime) -> None:
    """Count one use of its join token for each new node, in the caller's transaction.

    `newcomers` are pairs of the ticket and the node's name. One conditional UPDATE for each token, in the
    order of ids: concurrent transactions wait for each other and never spend more uses than the token has.
    Raises TokenRefused if the token has too few uses.
    """
    uses = list(newcomers)
    latest = {ticket.id: name for ticket, name in uses}
    for token_id, number in sorted(Counter(ticket.id for ticket, _ in uses).items()):
        usable = JoinToken.objects.filter(
            pk=token_id, uses__lte=F("max_uses") - number, revoked_at=None, expires_at__gt=now
        )
        spent = usable.update(uses=F("uses") + number, last_used_at=now, last_used_by=latest[token_id])
        if not spent:
            row = JoinToken.objects.filter(pk=token_id).first()
            raise (
                _token_refusal(row, state(row, now)) if row else WrongCredential("invalid registration token")
            )


def prune(*, before: datetime, limit: int) -> int:
    """Delete at most `limit` tokens that expired before `before`; return their number.

    A token with which a node registered stays, because its worker uses the token at a restart.
    """
    nodes = BackendNode.objects.filter(joined_with=OuterRef("pk"))
    old = JoinToken.objects.filter(~Exists(nodes), expires_at__lt=before).order_by("expires_at", "pk")
    deleted, _ = JoinToken.objects.filter(pk__in=list(old.values_list("pk", flat=True)[:limit])).delete()
    return deleted
