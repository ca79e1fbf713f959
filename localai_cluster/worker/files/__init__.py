"""The worker's file server (worker.md §12, §14): a controller uploads and downloads files.

`keys` resolves a request's key to a path and removes old staged files. `disk` reads and changes a file and
its side files in threads. `fetches` downloads files from their sources. `routes` handles requests, and
receives files under a lock for each path (`locks`).
"""
