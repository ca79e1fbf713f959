"""Messages between controllers and workers: subjects, payloads, and the bus that carries them.

`messages` defines subjects, payloads and the wire format, `bus` the interface of
a bus; `nats` and `link` are the only modules that import the NATS library. Nothing here imports Django.
"""
