"""Which engines a worker says it runs, in the form in which replicas are compared with it."""

from localai_cluster.messaging.messages import process_key
from nodes.backends.commands import Worker
from nodes.backends.outcomes import Done
from nodes.replicas.evidence import Running


async def engines_of(worker: Worker) -> Running | None:
    """The worker's own table (R4.32), asked once; None if it gave none (R4.34), whatever the reason."""
    answer = await worker.running()
    if not isinstance(answer, Done):
        return None
    return {
        (process_key(model.model_id, model.replica_index), model.address.rpartition(":")[2])
        for model in answer.reply.models
    }
