"""Operations over HTTP and websocket."""
