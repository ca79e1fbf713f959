"""Base classes for pages of Django's admin."""

from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import flatten, flatten_fieldsets
from django.core.exceptions import BadRequest, FieldDoesNotExist, ValidationError
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from localai_cluster.kit import leases

if TYPE_CHECKING:  # generic for the type checker only
    _ModelAdmin = admin.ModelAdmin[Any]
    TabularInline = admin.TabularInline[Any, Any]
else:
    _ModelAdmin, TabularInline = admin.ModelAdmin, admin.TabularInline


class ModelAdmin(_ModelAdmin):
    """Django's model admin. Invalid ids and NUL characters get 400 instead of a server error."""

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Return True if an address may filter the list by this column.

        A column that no page shows is refused: its value could be guessed by its beginning.
        """
        is_allowed = super().lookup_allowed(lookup, value, request)
        try:
            name = self.opts.get_field(lookup.partition("__")[0]).name
        except FieldDoesNotExist:
            return is_allowed
        filters: Any = self.get_list_filter(request)
        shown = [
            *(self.opts.pk.name, self.date_hierarchy),
            *flatten_fieldsets(self.get_fieldsets(request)),
            *self.get_list_display(request),
            *flatten(filters),
        ]
        return name in shown and is_allowed

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Raise BadRequest if a filter contains NUL, which PostgreSQL does not store in texts."""
        if any("\0" in value for _, values in request.GET.lists() for value in values):
            raise BadRequest("a filter contains NUL")
        return super().changelist_view(request, extra_context)

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *more: Any, **named: Any
    ) -> HttpResponse | None:
        """Raise BadRequest if a selected id is invalid."""
        try:
            for id in request.POST.getlist(ACTION_CHECKBOX_NAME):
                self.opts.pk.run_validators(self.opts.pk.to_python(id))
        except ValidationError:
            raise BadRequest("no row of this list has this id") from None
        return super().response_action(request, queryset, *more, **named)

    def render_messages(self, request: HttpRequest, title: str) -> TemplateResponse:
        """Return a page with the messages of this request.

        For secrets: until the page after a redirect they would be in a cookie.
        """
        request.current_app = self.admin_site.name
        context = {**self.admin_site.each_context(request), "title": title, "opts": self.opts}
        return TemplateResponse(request, "admin/messages.html", context)


class _ReadOnly:
    """Mixin for Django admin classes of rows that only the cluster writes."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class ObservedInline(_ReadOnly, TabularInline):
    """Read-only rows that the cluster writes, on the admin page of another row."""

    extra = 0
    can_delete = False


class Observed(_ReadOnly, ModelAdmin):
    """Read-only admin of rows that the cluster writes."""

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return the fields to show. The columns of a lease come last, because their model is abstract."""
        return sorted(super().get_fields(request, obj), key=lambda name: name in leases.LEASE_COLUMNS)
