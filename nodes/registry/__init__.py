"""Nodes: registration, identity, approval, settings, drains, heartbeats and timeline."""
