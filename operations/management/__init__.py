"""The command line, for machines without a browser: `manage.py nodes`, `operations` and `backends`."""
