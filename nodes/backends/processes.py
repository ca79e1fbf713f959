"""The engines that a worker reports as running, in the form that replicas are compared with."""

from localai_cluster.messaging.messages import process_key
from nodes.commands.commands import Worker
from nodes.commands.outcomes import Done
from nodes.replicas.evidence import Running


async def engines_of(worker: Worker) -> Running | None:
    """Return the worker's table of engines (R4.32) from one request; None without a reply (R4.34)."""
    reply = await worker.running()
    if not isinstance(reply, Done):
        return None
    return {
        (process_key(model.model_id, model.replica_index), model.address.rpartition(":")[2])
        for model in reply.reply.models
    }
