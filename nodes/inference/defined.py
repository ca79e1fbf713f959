"""Which model a request is meant for: the definition of its name."""

from localai_cluster.errors import NotFound
from nodes.definitions import folder
from nodes.definitions.files import Definition


class ModelNotFound(NotFound):
    """No model of that name is defined."""

    code = "model_not_found"


_DEFAULT_TAG = ":latest"
"""What Ollama's clients may add to a name. A model whose name really ends so comes first."""


async def defined(name: str) -> Definition:
    """The definition of a model, which may have another name; raises ModelNotFound."""
    definition = await folder.find(name)
    if definition is None and name.endswith(_DEFAULT_TAG):
        definition = await folder.find(name.removesuffix(_DEFAULT_TAG))
    if definition is None:
        raise ModelNotFound(
            f"The model {name[:100]!r} does not exist; GET /v1/models lists them", field="model"
        )
    return definition
