"""The OpenAI-compatible edge: raw ASGI applications in front of Django.

A request moves like this: `endpoint` checks the credential and reads the body -> a surface (`embeddings`,
`models`) checks the content -> `gateway` picks a replica or waits for a load, calls the engine, counts the
request out again -> the surface renders the answer. `wire` knows the envelopes, `openapi` describes the
routes. Sound and images lie in files on the worker of the replica meanwhile (`worker_files`).
"""
