"""`make fuzz`: schemathesis against the running product, once as admin and once as a node."""
