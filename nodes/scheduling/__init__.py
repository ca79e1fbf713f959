"""Scheduling rules: where and how often models shall run. The only writer of `model_scheduling_configs`."""
