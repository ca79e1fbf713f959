"""The registry at the command line, for machines without a browser: `manage.py nodes`."""
