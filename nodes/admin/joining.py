"""Join tokens and credentials for the bus: read-only here, but for revoking a token.

Tokens are made on the Nodes page or the command line, credentials with a registration.
"""

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import of_principal
from localai_cluster.kit import clock
from localai_cluster.web.admin import Observed
from nodes.admin import words
from nodes.models import BusCredential, JoinToken
from nodes.registry import joining


@admin.register(JoinToken)
class JoinTokenAdmin(Observed):
    """What other machines may join with."""

    list_display = ("shown", "state", "used", "expires", "created_by", "last_used_by")
    search_fields = ("note", "created_by", "last_used_by")
    date_hierarchy = "created_at"
    show_full_result_count = False
    actions = ("revoke",)
    fields = (
        "id",
        "note",
        "state",
        "used",
        ("created_at", "created_by"),
        "expires_at",
        ("revoked_at", "revoked_by"),
        ("last_used_at", "last_used_by"),
    )
    readonly_fields = ("id", "state", "used")

    @admin.display(description="note")
    def shown(self, token: JoinToken) -> str:
        """Its note, else the beginning of its id."""
        return str(token)

    @admin.display(description="state")
    def state(self, token: JoinToken) -> str:
        """What it is good for now."""
        return joining.state(token, clock.now()).replace("_", " ")

    @admin.display(description="uses", ordering="uses")
    def used(self, token: JoinToken) -> str:
        """Nodes admitted, of how many."""
        return f"{token.uses} of {token.max_uses}"

    @admin.display(description="expires", ordering="expires_at")
    def expires(self, token: JoinToken) -> str:
        """To the second."""
        return words.plain_time(token.expires_at)

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        """The permission to change join tokens is the one to revoke them; editing one is impossible."""
        return request.user.has_perm("nodes.change_jointoken")

    @admin.action(description="Revoke selected join tokens", permissions=["revoke"])
    def revoke(self, request: HttpRequest, tokens: QuerySet[JoinToken]) -> None:
        """They admit no new node any more."""
        actor = of_principal(principals.of_user(request.user))
        chosen = list(tokens.values_list("pk", flat=True))
        for token_id in chosen:
            joining.revoke(token_id, actor=actor, now=clock.now())
        messages.success(request, f"Revoked: {len(chosen)}. Nodes that joined with them stay.")


@admin.register(BusCredential)
class BusCredentialAdmin(Observed):
    """Which user of the message bus a node is, and until when: one row until it is revoked."""

    list_display = ("public_key", "node_id", "issued_at", "expires_at", "revoked_at")
    search_fields = ("public_key", "node_id")
