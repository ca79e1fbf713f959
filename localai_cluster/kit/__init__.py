"""Mechanisms that all layers use: time, names, errors, settings, processes, files and locks."""
