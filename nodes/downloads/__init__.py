"""Downloads of model files, the imports that need them, and files that nothing needs."""
