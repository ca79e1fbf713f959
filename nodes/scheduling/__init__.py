"""Scheduling rules: nodes and number of replicas of models. The only writer of `model_scheduling_configs`."""
