"""Cold loads: who asks waits (`wait`), the controller places, installs, starts and loads (`load`)."""
