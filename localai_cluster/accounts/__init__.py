"""People and programs that call: users, API keys, sessions, passwords, principals."""
