"""What HTTP, sockets and the API document have in common, without a table of their own."""
