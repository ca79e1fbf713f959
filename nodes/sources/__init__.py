"""Sources of models: what a pasted text means, which variants there are, and the plan of an import."""
