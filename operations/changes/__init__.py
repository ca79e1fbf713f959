"""The one stream of numbered changes: announced with each commit, fanned out, followed by cursors."""
