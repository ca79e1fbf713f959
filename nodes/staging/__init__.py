"""A model's files on their way from the controller's models folder to a worker, before its engine loads them.

A definition's options name files (`plan.py`), each has a key on the worker (`keys.py`) and a hash
(`hashes.py`). `transfer.py` brings one of them there over HTTP, `send.py` all of them, with the rules for
what fails, and answers the options as the engine there must be told them.
"""
