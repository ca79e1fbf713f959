"""The worker's file server (worker.md §12, §14): what a controller stages for engines, and what it fetches.

A request's key becomes a place in one of three folders (`keys`), under a lock that uploads of one file share
(`path_locks`). Everything that blocks runs in threads of its own (`threads`). `disk` says what lies at a
place and which of its side files may be believed, `uploads` receives, `routes` answers, `cleaning` removes
what was for one request.
"""
