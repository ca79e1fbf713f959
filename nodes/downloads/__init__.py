"""Downloads of model files, imports, and the removal of unused files."""
