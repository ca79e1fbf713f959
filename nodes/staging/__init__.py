"""Send a model's files from the controller's models folder to a worker, before its engine loads them.

A definition's options name files (`plan.py`); each has a key on the worker (`keys.py`) and a hash
(`hashes.py`). `transfer.py` sends one of them over HTTP, `send.py` sends all of them and applies the rules
for failures, and returns the options for the engine on that worker.
"""
