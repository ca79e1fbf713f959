"""The worker process of one machine: no Django, no database, one asyncio loop.

`main` is the command; `lifecycle` wires the parts: settings (`config`), the node's secret (`identity`), HTTP
calls (`control_plane`, `registration`, `heartbeats`), commands over the bus (`commands`, `install_commands`),
backends on disk (`backend_store`, `build_selection`, `installer`, `file_copy`), engine processes (`engines`,
`port_allocator`, `port_block`) and the orderly stop (`shutdown`).
"""
