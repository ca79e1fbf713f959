"""Model definitions: files in LocalAI's YAML form."""
