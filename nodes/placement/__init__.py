"""Placement of a replica: feasible nodes, their ranking, and the reasons of the decision. Pure.

Each function takes a snapshot and returns a decision.
"""
