"""The inference dialects: raw ASGI routes in front of Django (`routes` has their table).

`nodes/gateway/endpoint.py` checks the credential and reads the body, a dialect parses it, `nodes/gateway`
picks a replica or waits for a load and calls the engine, and the dialect renders the response. The dialects
for text are pure functions.
"""
