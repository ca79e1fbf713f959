"""The worker process of one machine: no Django, no database, one asyncio loop.

`__main__` is the command; `lifecycle` creates the components: settings (`config`), the node's secret
(`identity`), HTTP calls (`control_plane`, `registration`, `heartbeats`), commands over the bus (`commands`,
`install_commands`), backends on disk (`backend_store`, `installer`, `source_files`), engine processes
(`engines`, `ports`), and the orderly stop.
"""
