"""Messages between controllers and workers: subjects, payloads, codec, and the bus that carries them.

`messages` says what is sent, `subjects` where, `codec` how it looks on the wire, `bus` what any carrier
promises, and `nats` is the only module that knows the NATS library. Nothing here imports Django.
"""
