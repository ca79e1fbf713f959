"""Picking a loaded replica and counting what runs on it: the hot path, written by hand on an async pool.

A request moves like this: `picks.Picker.take` -> (batched with everybody else's) one statement -> a `Replica`
with its in-flight count raised -> the call -> `Picker.give_back` -> (batched) one statement. `statements`
holds the SQL, `process` keeps the row that stands for this web process; the tests keep a pure twin of the
statement's choice.
"""
