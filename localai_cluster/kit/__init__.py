"""Mechanisms that every layer uses: time, names, errors, settings, processes, files and locks."""
