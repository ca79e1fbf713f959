"""Unloading models and deleting their files: how it is asked for (`asking`) and done (`carry_out`)."""
