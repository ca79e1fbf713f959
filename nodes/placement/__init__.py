"""Placement of a replica: feasible nodes, their ranking, and the reasons of the decision. Pure.

A snapshot in, a decision out.
"""
