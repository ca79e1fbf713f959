"""Passwords of people: changing a password, and generated passwords, which must be changed first.

A user with a generated password has a row (`InitialPassword`). It is read with the user of every session, in
the same query, and is deleted when any code sets another password (`ChosenPassword`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.http import HttpRequest

from localai_cluster.accounts.models import InitialPassword
from localai_cluster.kit import errors


class PasswordChangeRequired(errors.Forbidden):
    """The user must change the generated password before other requests."""

    message = "The generated password must be changed first."
    code = "password_change_required"
    code_on_wire = True


class PasswordRefused(errors.InvalidInput):
    """A new password breaks rules; `problems` has a sentence for each broken rule, by field."""

    def __init__(self, problems: Mapping[str, Sequence[str]]) -> None:
        self.problems = problems
        sentences = [sentence for broken in problems.values() for sentence in broken]
        super().__init__(" ".join(sentences), field=next(iter(problems)))


class SessionBackend(ModelBackend):
    """Django authentication backend that accepts a user name or an e-mail address.

    It reads the `InitialPassword` in the same query as the user.
    """

    def authenticate(  # type: ignore[override]
        self, request: HttpRequest | None, username: str | None = None, password: str | None = None
    ) -> Any:
        """Return the user with this name or, without one, the only active user with this e-mail address."""
        return super().authenticate(request, username and _find_user_name(username), password)

    def get_user(self, user_id: Any) -> Any:
        """Return the active user with this id, or None."""
        user = get_user_model().objects.select_related("initial_password").filter(pk=user_id).first()
        return user if user is not None and self.user_can_authenticate(user) else None


def _find_user_name(text: str) -> str:
    """Return the user name for a user name or e-mail address.

    It makes one query in every case, so the time does not reveal whether the user exists.
    """
    users = get_user_model().objects
    matches = users.filter(Q(username=text) | Q(email__iexact=text, is_active=True))
    found = set(matches.values_list("username", flat=True)[:3])
    return found.pop() if len(found) == 1 and text not in found else text


class ChosenPassword:
    """Password validator whose hook ends the state of a generated password."""

    def validate(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Accept every password. Other validators check the rules."""

    def get_help_text(self) -> str:
        """Return the advice that Django's forms show."""
        return "A whole sentence is easier to remember and harder to guess."

    def password_changed(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Delete the user's `InitialPassword`. Django calls this after it has saved a new password."""
        if user is not None:
            InitialPassword.objects.filter(user_id=user.pk).delete()


_SENTENCE_BY_RULE = {
    "password_too_short": "Use at least {min_length} characters.",
    "password_too_common": "This password is too common.",
    "password_entirely_numeric": "Use at least one character that is not a digit.",
}
"""Sentence for each of Django's password rules, by its code. Other rules keep Django's message."""


def must_change(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Return True if this signed-in user must change a generated password."""
    return user.pk is not None and hasattr(user, "initial_password")


def change_password(user_id: int, old: str, new: str) -> Any:
    """Change the user's password and return the user. Raise PasswordRefused with all broken rules.

    The rules: `old` is the current password, `new` differs from `old`, and Django's validators accept `new`.
    """
    with transaction.atomic():
        user = get_user_model().objects.select_for_update(no_key=True).get(pk=user_id)
        problems: dict[str, list[str]] = {}
        if not user.check_password(old):
            problems["old"] = ["Current password is incorrect."]
        if broken := _broken_rules(old, new, user):
            problems["new"] = broken
        if problems:
            raise PasswordRefused(problems)
        user.set_password(new)
        user.save(update_fields=["password"])
    return user


def _broken_rules(old: str, new: str, user: Any) -> list[str]:
    if new == old:
        return ["The new password must differ from the current one."]
    try:
        validate_password(new, user)
    except ValidationError as error:
        return [_describe_rule(problem) for problem in error.error_list]
    return []


def _describe_rule(error: ValidationError) -> str:
    template = _SENTENCE_BY_RULE.get(error.code or "")
    return template.format(**(error.params or {})) if template else " ".join(error.messages)
