"""Who is a node: states, registration, identity, labels, drains, heartbeats, timeline, overrides.

`services.py` names every verb that changes a node; callers outside this room use that module.
"""
