"""Recurring passes over the fleet (observe, plan purely, apply), and the wakes of what waits for nodes."""
