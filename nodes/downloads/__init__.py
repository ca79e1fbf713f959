"""Downloads of model files into the models folder, the imports that need them, and files that nothing needs."""
