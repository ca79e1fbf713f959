"""Decisions about placement and scale: what they read, their record, and how they are explained."""
