"""Passwords of people: the generated one that must be changed first, and how one is changed.

Whose password was generated has a row (`InitialPassword`). It is read with the user of every session, in the
same query, and goes with the next password, wherever it is set (`ChosenPassword`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.backends import ModelBackend
from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db import transaction

from localai_cluster import errors
from localai_cluster.accounts.models import InitialPassword


class PasswordChangeRequired(errors.Forbidden):
    """The generated password must be changed first."""

    code = "password_change_required"
    code_on_wire = True


class PasswordRefused(errors.InvalidInput):
    """A change of password that breaks rules: `problems` has one sentence per broken rule, by field."""

    def __init__(self, problems: Mapping[str, Sequence[str]]) -> None:
        self.problems = problems
        sentences = [sentence for found in problems.values() for sentence in found]
        super().__init__(" ".join(sentences), field=next(iter(problems)))


class SessionBackend(ModelBackend):
    """Django's own, which reads with a session's user whether the password was generated."""

    def get_user(self, user_id: Any) -> Any:
        """The active user with this id, or None."""
        user = get_user_model().objects.select_related("initial_password").filter(pk=user_id).first()
        return user if user is not None and self.user_can_authenticate(user) else None


class ChosenPassword:
    """Django's hook for new passwords: a password that a person has set no longer counts as generated."""

    def validate(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Accept every password; the other validators judge it."""

    def get_help_text(self) -> str:
        """For Django's own forms."""
        return "A whole sentence is easier to remember and harder to guess."

    def password_changed(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Told by Django after a user with a new password was saved."""
        if user is not None:
            InitialPassword.objects.filter(user_id=user.pk).delete()


_SENTENCES = {
    "password_too_short": "Use at least {min_length} characters.",
    "password_too_common": "This password is too common.",
    "password_entirely_numeric": "Use at least one character that is not a digit.",
}
"""Django's rules by their codes, each as one sentence; another rule keeps its own words."""


def must_change(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Whether this signed-in user still has the password that was generated."""
    return user.pk is not None and hasattr(user, "initial_password")


def change(user_id: int, old: str, new: str) -> Any:
    """Give a user another password and return the user.

    Raises PasswordRefused with all that is wrong: `old` is not the current password, `new` is the same or
    the validators refuse it.
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
        return [_sentence(one) for one in error.error_list]
    return []


def _sentence(error: ValidationError) -> str:
    known = _SENTENCES.get(error.code or "")
    return known.format(**(error.params or {})) if known else " ".join(error.messages)
