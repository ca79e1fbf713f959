"""The life of replicas and the only writer of their rows; `states.py` has the table of phases and events.

`slots.py` reserves, stages, starts and publishes a load, or ends the load. `drains.py` drains replicas and
returns them to the picks, `terminations.py` terminates replicas, `stops.py` stops engines, and `engines.py`
deletes rows when the end of the engine is confirmed and calls `hooks.py`. Each of these modules changes
phases through `engines.apply_event`.
"""
