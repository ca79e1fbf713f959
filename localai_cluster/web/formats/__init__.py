"""Formats of Django's own pages by language."""
