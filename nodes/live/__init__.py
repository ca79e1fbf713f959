"""The live feed of the pages: nodes, notices and operations over one websocket."""
