"""The dialects of inference, raw ASGI routes in front of Django (`routes` is their table).

`nodes/gateway/endpoint.py` checks the credential and reads the body, a dialect parses it, `nodes/gateway`
picks a replica or waits for a load and calls the engine, and the dialect renders the response. Dialects of
text are pure.
"""
