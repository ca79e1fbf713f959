"""Management commands of the project: the long-running processes and their set-up."""
