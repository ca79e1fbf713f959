"""Pages of the admin in a browser: the content of their forms, and the effects of their buttons."""

from html.parser import HTMLParser
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

LIST = "/admin/nodes/backendnode/"


def superuser(name: str = "root") -> Client:
    """Return a signed-in superuser, whose forms need their CSRF token."""
    return signed_in(get_user_model().objects.create_superuser(name))


def staff(name: str, *permissions: str) -> Client:
    """Return a signed-in staff user with these permissions, for example `change_backendnode`."""
    user = get_user_model().objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    return signed_in(user)


def signed_in(user: Any) -> Client:
    """Return a browser that is signed in as this user."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def url(node_id: UUID, page: str = "change") -> str:
    """Return the URL of a node's page."""
    return f"{LIST}{node_id}/{page}/"


class Forms(HTMLParser):
    """Collects the POST forms of a page: the action, and the values that each form would send unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the beginning of a form, or an input of a form."""
        values = {name: value or "" for name, value in attrs}
        names = dict(attrs).keys()
        if tag == "form":
            self._open = values.get("method") == "post" and "logout" not in values.get("id", "")
            if self._open:
                self.found.append((values.get("action", ""), {}))
        elif tag == "input" and self._open and "name" in names and "disabled" not in names:
            kind = values.get("type", "text")
            if kind == "submit" or (kind == "checkbox" and "checked" not in names):
                return
            self.found[-1][1][values["name"]] = values.get("value", "on" if kind == "checkbox" else "")

    def handle_endtag(self, tag: str) -> None:
        """Record the end of a form."""
        if tag == "form":
            self._open = False


def form_of(page: Any) -> tuple[str, dict[str, str]]:
    """Return the target of the page's own form, and the values that it would send unchanged."""
    parser = Forms()
    parser.feed(page.content.decode())
    ((action, fields),) = [form for form in parser.found if form[0] != LIST]
    return action or page.wsgi_request.get_full_path(), fields


def form_with(page: Any, action: str) -> dict[str, str]:
    """Return what the button of an action on a node's page would send."""
    parser = Forms()
    parser.feed(page.content.decode())
    (fields,) = [fields for _, fields in parser.found if fields.get("action") == action]
    return fields


def load(browser: Client, node_id: UUID) -> dict[str, str]:
    """Return the values that a node's page would send unchanged."""
    return form_of(browser.get(url(node_id)))[1]


def confirm(browser: Client, page: Any, **typed: str) -> Any:
    """Press "yes" on a confirmation page; return the next page."""
    action, fields = form_of(page)
    return browser.post(action, fields | typed, follow=True)


def select(browser: Client, verb: str, *ids: UUID | int, at: str = LIST) -> Any:
    """Choose a bulk action for rows of a list; return the confirmation page."""
    fields = form_of(browser.get(at))[1]
    fields = {name: value for name, value in fields.items() if name != "_selected_action"}
    return browser.post(at, {**fields, "action": verb, "_selected_action": [str(one) for one in ids]})


def messages(page: Any) -> list[str]:
    """Return the messages at the top of the page."""
    return [str(message) for message in page.context["messages"]]
