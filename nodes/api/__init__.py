"""The registry over HTTP: authentication, error envelopes, REST views, heartbeats, the OpenAPI document."""
