"""The fleet's recurring tasks."""

from localai_cluster.kit.periodic import Recurring

# Every 5 s, not every 15 (C14): a dead web process's counts must be true again within 30 s.
SCHEDULES = [
    Recurring("nodes: liveness", "nodes.reconcilers.tasks.liveness", "* * * * * */5"),
    # C1. What it asks for is done by controllers, which are on the bus.
    Recurring("nodes: state pass", "nodes.reconcilers.tasks.state_pass", "* * * * * */30"),
    Recurring("nodes: ended drains", "nodes.reconcilers.tasks.finish_drains", "* * * * * */5"),
    # C1; between two ticks the controllers run the pass after each change (`replica_wake_ups.py`).
    Recurring("nodes: replicas", "nodes.reconcilers.tasks.scale", "* * * * * */30"),
    Recurring("nodes: memory samples", "nodes.reconcilers.tasks.keep_samples", "* * * * * 0"),
    Recurring("nodes: timeline", "nodes.reconcilers.tasks.prune_timeline", "17 * * * * 0"),
    Recurring("nodes: stale intents", "nodes.reconcilers.tasks.clean_intents", "* * * * * */15"),
    # Every six hours (C47); the first one is a controller's, ten seconds after it starts.
    Recurring("backends: upgrade check", "nodes.reconcilers.tasks.check_upgrades", "23 */6 * * * 0"),
]
