#!/usr/bin/env python
"""Django's command line for this project."""

from localai_cluster.manage import main

if __name__ == "__main__":
    main()
