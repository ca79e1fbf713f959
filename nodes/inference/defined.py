"""Which model a request is meant for: the definition of its name."""

from localai_cluster.errors import NotFound
from nodes.definitions import folder
from nodes.definitions.files import Definition


class ModelNotFound(NotFound):
    """No model of that name is defined."""

    code = "model_not_found"


async def defined(name: str) -> Definition:
    """The definition of a model; raises ModelNotFound."""
    definition = await folder.find(name)
    if definition is None:
        raise ModelNotFound(
            f"The model {name[:100]!r} does not exist; GET /v1/models lists them", field="model"
        )
    return definition
