"""Cold loads: who asks waits (`wait`), the controller places, installs, starts and loads (`load`).

What wants one more replica of a model asks in `another`.
"""
