"""The registry of nodes: states, registration, identity, labels, drains, heartbeats, timeline, overrides.

`services.py` names every verb that changes a node; callers outside this package use that module.
"""
