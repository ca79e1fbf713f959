"""Recurring passes over the fleet: observe, plan (pure), apply."""
