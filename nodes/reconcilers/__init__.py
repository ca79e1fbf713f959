"""Recurring passes over the fleet (observe, plan purely, apply), and wake-ups of waiting work."""
