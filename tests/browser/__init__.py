"""The user interface in a real browser: tests of it, its pictures and its figures."""
