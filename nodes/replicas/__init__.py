"""The life of replicas and the only writer of their rows; `states.py` has the table of phases and events.

`slots.py` reserves, stages, starts and publishes, or ends a load. `drains.py` takes replicas out of the picks
and returns them, `terminations.py` takes them out for good, `stops.py` stops engines, `engines.py`
deletes rows when the end is confirmed and calls `hooks.py`. Each goes through `engines.apply_event`.
"""
