"""The project package.

Settings and entry points above both apps, mechanism (clock, messaging, rpc …) below them.
"""
