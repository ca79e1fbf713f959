"""Lists with many columns."""

from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse

from localai_cluster.web.admin import ModelAdmin

if TYPE_CHECKING:
    Base = ModelAdmin
else:
    Base = object


class Wide(Base):
    """A model admin whose list has the whole width, without the menu at its side."""

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The list."""
        whole = {**(extra_context or {}), "is_nav_sidebar_enabled": False}
        return super().changelist_view(request, whole)
