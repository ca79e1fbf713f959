"""Loads: requests wait (`wait.py`); the controller places, installs, stages, starts and loads (`load.py`).

`load_request.py` has the payload of a load and creates loads. `load_explanation.py` only reads.
"""
