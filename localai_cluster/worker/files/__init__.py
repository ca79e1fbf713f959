"""The worker's file server (worker.md §12, §14), which receives and serves files for a controller.

A controller stages the files of engines here and fetches what they write. `keys` resolves a request's key to
a path in one of three folders, and `path_locks` serializes the uploads of one file. Blocking calls run in
separate threads (`threads`). `disk` reads and changes a file and its side files, `uploads` receives files,
`routes` handles requests, `cleaning` removes files staged for single requests.
"""
