"""The fleet's recurring tasks."""

from localai_cluster.periodic import Recurring

# Every 5 s, not every 15 (C14): a dead web process's counts must be true again within 30 s.
SCHEDULES = [
    Recurring("nodes: liveness", "nodes.reconcilers.tasks.liveness", "* * * * * */5"),
    Recurring("nodes: ended drains", "nodes.reconcilers.tasks.finish_drains", "* * * * * */5"),
    Recurring("nodes: timeline", "nodes.reconcilers.tasks.prune_timeline", "17 * * * * 0"),
]
