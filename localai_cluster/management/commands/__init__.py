"""Management commands of the project: the long-running processes."""
