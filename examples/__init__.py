"""Example galleries, models and the demo; see README.md."""
