"""The stream of numbered changes: published with each commit, fanned out, followed by cursors."""
