"""Management commands of the registry."""
