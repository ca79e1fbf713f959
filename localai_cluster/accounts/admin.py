"""Django admin of accounts: users' API keys, unchanged initial passwords, and the audit."""

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from localai_cluster.accounts import api_keys, principals
from localai_cluster.accounts.models import ApiKey, AuditEntry, InitialPassword
from localai_cluster.kit import clock
from localai_cluster.web.admin import ModelAdmin, Observed


@admin.register(ApiKey)
class ApiKeyAdmin(ModelAdmin):
    """Admin of users' API keys. The plaintext of a key is shown once, when the key is created."""

    list_display = ("name", "prefix", "user", "created_at", "revoked_at")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter),)
    list_select_related = ("user",)
    actions = ("revoke",)
    readonly_fields = ("prefix", "created_at", "revoked_at")

    def get_readonly_fields(self, request: HttpRequest, obj: ApiKey | None = None) -> tuple[str, ...]:
        """Make the user of an existing key read-only."""
        return self.readonly_fields if obj is None else ("user", *self.readonly_fields)

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Create the key and show its plaintext, or store the new name."""
        if change:
            obj.save(update_fields=["name"])
            return
        row, plain = principals.create_api_key(obj.user, obj.name)
        obj.pk, obj.prefix, obj.key_hash = row.pk, row.prefix, row.key_hash
        self.message_user(request, f"API key, shown only once: {plain}", messages.WARNING)

    def response_add(self, request: HttpRequest, obj: ApiKey, *_: Any, **__: Any) -> HttpResponse:
        """Show the plaintext of the new key."""
        return self.render_messages(request, f"Created: API key {obj}")

    @admin.action(description="Revoke selected API keys", permissions=["change"])
    def revoke(self, request: HttpRequest, keys: QuerySet[ApiKey]) -> None:
        """Revoke the keys for good."""
        messages.success(request, f"Revoked: {api_keys.revoke_keys(keys, now=clock.now())}.")


@admin.register(InitialPassword)
class InitialPasswordAdmin(ModelAdmin):
    """Admin of users who have not changed their generated password. Deleting a user deletes the row."""

    list_display = ("user", "created_at")
    list_select_related = ("user",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: only the cluster adds rows, when it generates a password."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: InitialPassword | None = None) -> bool:
        """Return False: a row has no field that a person could change."""
        return False


@admin.register(AuditEntry)
class AuditEntryAdmin(Observed):
    """Admin of the audit: actor, change, time and address of each change that a person made."""

    list_display = ("at", "actor", "kind", "subject", "detail", "address")
    list_filter = ("kind", "actor_kind")
    search_fields = ("actor", "subject", "subject_id", "request_id", "address")
    search_help_text = "Actor, subject, ID, request ID or address"
    date_hierarchy = "at"
    show_full_result_count = False
    ordering = ("-id",)
