"""Bulk actions behind a page that says what will happen to each row; the services of the API do it.

A row may change between the page and the answer: the service decides again, and its refusal is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from localai_cluster.accounts import principals
from localai_cluster.accounts.authentication import client_address
from localai_cluster.kit import errors
from localai_cluster.kit.logs import request_id
from localai_cluster.web.admin import Observed
from nodes.admin import words
from nodes.admin.carry import MOST_AT_ONCE
from nodes.backends.backend_requests import Asked

_MOST_REFUSALS_TOLD = 20


@dataclass(frozen=True)
class Deed:
    """One thing that an admin can do to rows."""

    name: str
    title: str
    done: str
    """What it has done, for the message afterwards."""
    meaning: str
    refusal: Callable[[Any], str]
    """Why it does not apply to this row, "" if it does."""
    run: Callable[[Any, Asked, str], object]
    """Does it to a row, for whom, with a comment. Raises ClusterError."""
    form: type[forms.Form] = forms.Form
    grave: bool = False


@dataclass(frozen=True)
class Line:
    """One row on the page, and why nothing will happen to it, "" if something will."""

    row: Any
    refusal: str

    @property
    def where(self) -> str:
        """Its node."""
        return str(getattr(self.row, "node_name", "") or getattr(self.row, "node", "") or words.NOTHING)

    @property
    def says(self) -> str:
        """What it says of itself."""
        return getattr(self.row, "message", "") or getattr(self.row, "last_error", "") or words.NOTHING


class DeedAdmin(Observed):
    """Read-only rows, and what can be done to them."""

    deeds: tuple[Deed, ...] = ()

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """The permission to change rows is the one to act on them; editing one is impossible."""
        return bool(request.user.has_perm(f"{self.opts.app_label}.change_{self.opts.model_name}"))

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """The deeds, for who may do them."""
        if not self.has_operate_permission(request):
            return {}
        return {deed.name: (_action(deed), deed.name, f"{deed.title}…") for deed in self.deeds}

    def ask_or_do(self, request: HttpRequest, rows: QuerySet[Any], deed: Deed) -> HttpResponse | None:
        """The page that asks, or, after its answer, the deed."""
        found = list(rows[: MOST_AT_ONCE + 1])
        if len(found) > MOST_AT_ONCE:
            self.message_user(request, f"Select at most {MOST_AT_ONCE} rows.", messages.ERROR)
            return None
        form = deed.form(request.POST if "confirmed" in request.POST else None)
        if form.is_bound and form.is_valid():
            self._do(request, found, deed, str(form.cleaned_data.get("comment", "")))
            return None
        return self._page(request, found, deed, form)

    def _do(self, request: HttpRequest, rows: list[Any], deed: Deed, comment: str) -> None:
        who = principals.of_user(request.user).name
        asked = Asked((), actor=who, request_id=request_id.get(), client_address=client_address(request))
        done, refused = [], []
        for row in rows:
            try:
                deed.run(row, asked, comment)
                done.append(str(row))
            except errors.ClusterError as refusal:
                refused.append(f"{row}: {refusal.message}.")
        if done:
            self.message_user(request, f"{words.listed(done)}: {deed.done}.", messages.SUCCESS)
        for text in refused[:_MOST_REFUSALS_TOLD]:
            self.message_user(request, text, messages.ERROR)
        if (more := len(refused) - _MOST_REFUSALS_TOLD) > 0:
            self.message_user(request, f"{more} more were skipped.", messages.ERROR)

    def _page(self, request: HttpRequest, rows: list[Any], deed: Deed, form: forms.Form) -> HttpResponse:
        lines = [Line(row, deed.refusal(row)) for row in rows]
        context = {
            **self.admin_site.each_context(request),
            "title": f"Confirm: {deed.title}",
            "opts": self.opts,
            "deed": deed,
            "form": form,
            "lines": lines,
            "possible": [line.row for line in lines if not line.refusal],
            "checkbox": ACTION_CHECKBOX_NAME,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/nodes/deed.html", context)


def _action(deed: Deed) -> Any:
    def act(admin: DeedAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        return admin.ask_or_do(request, queryset, deed)

    return act
