"""The stream of numbered changes: published with each commit, distributed to all readers, read by cursors."""
