"""The worker process of one machine: no Django, no database, one asyncio loop.

`main` wires it: settings (`config`), the node's own secret (`identity`), registration and heartbeats over
HTTP, commands over the bus (`commands`), backends on disk (`listing`, `gallery`, `install`), engine
processes (`processes`, `ports`) and the orderly end (`shutdown`).
"""
