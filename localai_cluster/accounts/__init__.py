"""People and programs that send requests: users, API keys, sessions, passwords, principals."""
