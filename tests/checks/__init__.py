"""Checks of the source that no linter offers; `make test` runs them beside ruff."""
