"""The worker's file server (worker.md §12, §14): a controller stages files for engines and fetches their
output.

`keys` resolves a request's key to a path in one of three folders, and `path_locks` serializes the uploads of
one file. Blocking calls run in separate threads (`threads`). `disk` reads and changes a file and its side
files, `uploads` receives files, `routes` handles requests, `cleaning` removes files staged for single
requests.
"""
