"""Pages of the admin as a browser has them: what their forms carry, and what their buttons do."""

from html.parser import HTMLParser
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

LIST = "/admin/nodes/backendnode/"


def superuser(name: str = "root") -> Client:
    """A signed-in superuser, whose forms need their CSRF token."""
    return signed_in(get_user_model().objects.create_superuser(name))


def staff(name: str, *permissions: str) -> Client:
    """A signed-in member of the staff with these permissions, `change_backendnode` for instance."""
    user = get_user_model().objects.create_user(name, is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    assert user.user_permissions.count() == len(permissions)
    return signed_in(user)


def signed_in(user: Any) -> Client:
    """A browser of this user."""
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


def url(node_id: UUID, page: str = "change") -> str:
    """Return the URL of a node's page."""
    return f"{LIST}{node_id}/{page}/"


class Forms(HTMLParser):
    """Collects the POST forms of a page: action, and what each would send untouched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A form begins, or an input of it."""
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
        """A form ends."""
        if tag == "form":
            self._open = False


def form_of(page: Any) -> tuple[str, dict[str, str]]:
    """Return the target of the page's own form, and what it would send untouched."""
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
    """What a node's page would send untouched."""
    return form_of(browser.get(url(node_id)))[1]


def confirm(browser: Client, page: Any, **typed: str) -> Any:
    """Presses "yes" on a confirmation page; answers the page that follows."""
    action, fields = form_of(page)
    return browser.post(action, fields | typed, follow=True)


def select(browser: Client, verb: str, *ids: UUID | int, at: str = LIST) -> Any:
    """Chooses a bulk action for rows of a list; answers the confirmation page."""
    fields = form_of(browser.get(at))[1]
    fields = {name: value for name, value in fields.items() if name != "_selected_action"}
    return browser.post(at, {**fields, "action": verb, "_selected_action": [str(one) for one in ids]})


def messages(page: Any) -> list[str]:
    """What the page says on top."""
    return [str(message) for message in page.context["messages"]]
