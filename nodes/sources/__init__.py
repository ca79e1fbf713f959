"""Sources of models: parsing of a pasted text, the variants of its model, and the plan of an import."""
