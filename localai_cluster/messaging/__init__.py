"""Messages between controllers and workers: subjects, payloads, codec, and the bus that carries them.

`messages` defines the payloads, `subjects` the subject names, `codec` the wire format, `bus` the interface of
a bus; `nats` and `link` are the only modules that import the NATS library. Nothing here imports Django.
"""
