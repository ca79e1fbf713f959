"""The fleet's recurring tasks."""

from localai_cluster.scheduling import Recurring

# Every 5 s, not every 15 (C14): a dead web process's counts must be true again within 30 s.
SCHEDULES = [Recurring("nodes: liveness", "nodes.tasks.liveness", "* * * * * */5")]
