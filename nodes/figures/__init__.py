"""Figures over time of the cluster, its nodes and its models: samples, roll-up, retention and reading."""
