"""Code that HTTP routes, websockets and the API document share; it has no tables."""
