"""The models and their migrations agree."""

import pytest
from django.core.management import call_command


@pytest.mark.django_db
def test_no_change_of_a_model_is_without_its_migration() -> None:
    """`makemigrations --check` would exit with 1."""
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)
