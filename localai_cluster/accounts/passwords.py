"""Passwords of people: the generated one that must be changed first, and how one is changed.

Whose password was generated has a row (`InitialPassword`). It is read with the user of every session, in the
same query, and goes with the next password, whoever sets it and wherever (`ChosenPassword`).
"""

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


class WrongPassword(errors.InvalidInput):
    """This is not the present password."""

    def __init__(self) -> None:
        super().__init__(field="old")


class SessionBackend(ModelBackend):
    """Django's own, which reads with a session's user whether the password was generated."""

    def get_user(self, user_id: Any) -> Any:
        """The active user with this id, or None."""
        user = get_user_model().objects.select_related("initial_password").filter(pk=user_id).first()
        return user if user is not None and self.user_can_authenticate(user) else None


class ChosenPassword:
    """Django's hook for new passwords: one that somebody has set is a generated one no more."""

    def validate(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Has nothing against any password; the other validators have."""

    def get_help_text(self) -> str:
        """For Django's own forms."""
        return "A whole sentence is easier to remember and harder to guess."

    def password_changed(self, password: str, user: AbstractBaseUser | None = None) -> None:
        """Told by Django after a user with a new password was saved."""
        if user is not None:
            InitialPassword.objects.filter(user_id=user.pk).delete()


def must_change(user: AbstractBaseUser | AnonymousUser) -> bool:
    """Whether this signed-in user still has the password that was generated."""
    return user.pk is not None and hasattr(user, "initial_password")


def change(user_id: int, old: str, new: str) -> Any:
    """Gives a user another password and returns the user.

    Raises WrongPassword if `old` is not the present one, InvalidInput if `new` is the same or the
    validators refuse it.
    """
    with transaction.atomic():
        user = get_user_model().objects.select_for_update(no_key=True).get(pk=user_id)
        if not user.check_password(old):
            raise WrongPassword
        if new == old:
            raise errors.InvalidInput("The new password is the old one.", field="new")
        try:
            validate_password(new, user)
        except ValidationError as error:
            raise errors.InvalidInput(" ".join(error.messages), field="new") from error
        user.set_password(new)
        user.save(update_fields=["password"])
    return user
