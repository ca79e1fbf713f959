"""From a button or a bulk action over a page that says what will happen to the service that does it.

The page carries, for each row, the revision of its node as it was shown. A node that has changed since is
left alone (`carry.py`), and the message names what changed: no one decides on facts that the page did not
show. Only a POST changes anything.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from django import forms
from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.views.decorators.http import require_POST, require_safe

from localai_cluster.accounts import principals
from localai_cluster.accounts.actors import of_principal
from localai_cluster.web.admin import ModelAdmin
from nodes.admin import seen, words
from nodes.admin.carry import MOST_AT_ONCE, Carrier, Report, Ticket, read_tickets
from nodes.admin.verbs import Verb

_MOST_REFUSALS_TOLD = 20


@dataclass(frozen=True)
class Step:
    """One line of the page."""

    row: Any
    url: str
    node: Any
    text: str
    """What will happen, or why nothing will."""
    skipped: bool


class VerbAdmin(ModelAdmin):
    """A model admin whose bulk actions and buttons are verbs."""

    verbs: tuple[Verb, ...] = ()
    node_path = "pk"
    """From a row to its node's id, for a query."""

    def node_of(self, row: Any) -> Any:
        """The node that a row is or belongs to."""
        return row

    def url_after(self, row: Any) -> str:
        """The page to return to after the button of one row."""
        return reverse("admin:nodes_backendnode_change", args=[self.node_of(row).pk])

    def allowed(self, request: HttpRequest, verb: Verb) -> bool:
        """Whether the user may do that."""
        return bool(getattr(self, f"has_{verb.permission}_permission")(request))

    def get_urls(self) -> list[URLPattern]:
        """Two for each verb: the page for one row, and where every page leads."""
        ours = []
        for verb in self.verbs:
            name = f"{self.opts.app_label}_{self.opts.model_name}_{verb.name}"
            ask, do = partial(self._ask_one, verb=verb), partial(self._carry_out, verb=verb)
            ours += [
                path(f"<uuid:pk>/{verb.name}/", self.admin_site.admin_view(require_safe(ask)), name=name),
                path(f"{verb.name}/", self.admin_site.admin_view(require_POST(do)), name=f"{name}_all"),
            ]
        return ours + super().get_urls()

    def get_actions(self, request: HttpRequest) -> dict[str, Any]:
        """The verbs that the user may use; Django's own deletion is not among them."""
        return {
            verb.name: (_bulk(verb), verb.name, self._title(verb, one=False))
            for verb in self.verbs
            if self.allowed(request, verb)
        }

    def _title(self, verb: Verb, *, one: bool) -> str:
        return verb.title if one else f"{verb.many or verb.title} selected {self.opts.verbose_name_plural}"

    def _rows(self, request: HttpRequest, ids: Iterable[UUID]) -> QuerySet[Any]:
        rows = self.get_queryset(request).filter(pk__in=list(ids))
        shown: QuerySet[Any] = rows.annotate(newest_event=seen.newest_event(self.node_path))
        return shown

    def _ask_one(self, request: HttpRequest, pk: UUID, *, verb: Verb) -> HttpResponse:
        """The page for one row, from its button."""
        self._check(request, verb)
        rows = list(self._rows(request, [pk]))
        if not rows:
            return self.gone(request)
        return self._page(request, verb, rows, verb.form(), one=True, filters="")

    def ask_many(self, request: HttpRequest, queryset: QuerySet[Any], verb: Verb) -> HttpResponse | None:
        """The page for the rows selected in a list."""
        ids = list(queryset.order_by().values_list("pk", flat=True)[: MOST_AT_ONCE + 1])
        if len(ids) > MOST_AT_ONCE:
            self.message_user(request, f"Select at most {MOST_AT_ONCE} rows.", messages.ERROR)
            return None
        rows = list(self._rows(request, ids))
        return self._page(request, verb, rows, verb.form(), one=False, filters=request.GET.urlencode())

    def _carry_out(self, request: HttpRequest, *, verb: Verb) -> HttpResponse:
        """Does what the page said; shows it again if what it asked for was not given."""
        self._check(request, verb)
        tickets = read_tickets(request.POST.get("items", ""))
        rows = {row.pk: row for row in self._rows(request, (ticket.pk for ticket in tickets))}
        form = verb.form(request.POST)
        one, filters = "one" in request.POST, request.POST.get("filters", "")
        if not form.is_valid():
            return self._page(request, verb, list(rows.values()), form, one=one, filters=filters)
        actor = of_principal(principals.of_user(request.user))
        report = Carrier(verb, actor, form.cleaned_data, self.node_of).carry_out(tickets, rows)
        self._tell(request, verb, report)
        if one and len(rows) == 1 and verb.permission != "delete":
            return HttpResponseRedirect(self.url_after(*rows.values()))
        return HttpResponseRedirect(self._list_url(filters))

    def _list_url(self, filters: str) -> str:
        url = reverse(f"admin:{self.opts.app_label}_{self.opts.model_name}_changelist")
        return f"{url}?{filters}" if filters else url

    def gone(self, request: HttpRequest) -> HttpResponse:
        """Back to the list, with a message about the missing row."""
        self.message_user(request, f"This {self.opts.verbose_name} no longer exists.", messages.WARNING)
        return HttpResponseRedirect(self._list_url(""))

    def _check(self, request: HttpRequest, verb: Verb) -> None:
        if not self.allowed(request, verb):
            raise PermissionDenied

    def _tell(self, request: HttpRequest, verb: Verb, report: Report) -> None:
        if report.done:
            what = "Node" if len(report.done) == 1 else "Nodes"
            done = f"{what} {words.listed(report.done)}: {verb.done}."
            self.message_user(request, done, messages.SUCCESS)
        for text in report.notices:
            self.message_user(request, text, messages.WARNING)
        for text in report.refused[:_MOST_REFUSALS_TOLD]:
            self.message_user(request, f"{text}.", messages.ERROR)
        if (more := len(report.refused) - _MOST_REFUSALS_TOLD) > 0:
            self.message_user(request, f"{more} more were skipped.", messages.ERROR)

    def _page(
        self, request: HttpRequest, verb: Verb, rows: list[Any], form: forms.Form, *, one: bool, filters: str
    ) -> TemplateResponse:
        lines = [self._step(verb, row) for row in rows]
        steps = [line for line in lines if not line.skipped]
        tickets = [Ticket(step.row.pk, step.node.revision, step.row.newest_event) for step in steps]
        base = f"admin:{self.opts.app_label}_{self.opts.model_name}"
        context = {
            **self.admin_site.each_context(request),
            "title": f"Confirm: {self._title(verb, one=one)}",
            "opts": self.opts,
            "verb": verb,
            "lines": [*steps, *(line for line in lines if line.skipped)],
            "number": len(steps),
            "form": form,
            "items": " ".join(str(ticket) for ticket in tickets),
            "one": one,
            "filters": filters,
            "action_url": reverse(f"{base}_{verb.name}_all"),
            "back_url": self.url_after(rows[0]) if one and rows else self._list_url(filters),
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/nodes/confirm.html", context)

    def _step(self, verb: Verb, row: Any) -> Step:
        node, refusal = self.node_of(row), verb.refusal(row)
        url = reverse("admin:nodes_backendnode_change", args=[node.pk])
        return Step(row, url, node, refusal or verb.effect(row), skipped=bool(refusal))


def _bulk(verb: Verb) -> Any:
    def ask(admin: VerbAdmin, request: HttpRequest, queryset: QuerySet[Any]) -> HttpResponse | None:
        return admin.ask_many(request, queryset, verb)

    return ask
