"""The ledger's recurring tasks."""

from localai_cluster.kit.periodic import Recurring

SCHEDULES = [
    Recurring(
        "operations: expired leases", "operations.reconcilers.tasks.reap_expired_leases", "* * * * * */5"
    ),
    Recurring("operations: record", "operations.reconcilers.tasks.prune_record", "23 * * * * 0"),
]
