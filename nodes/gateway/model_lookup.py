"""Lookup of the model definition for the name in a request."""

from localai_cluster.kit.errors import NotFound
from nodes.definitions import folder
from nodes.definitions.files import Definition


class ModelNotFound(NotFound):
    """No model of that name is defined."""

    code = "model_not_found"


_DEFAULT_TAG = ":latest"
"""The tag that Ollama's clients may append to a name. A model whose name really ends with it takes
precedence.
"""


async def defined(name: str) -> Definition:
    """Return the definition for a requested name, with or without the default tag; raise ModelNotFound."""
    definition = await folder.find(name)
    if definition is None and name.endswith(_DEFAULT_TAG):
        definition = await folder.find(name.removesuffix(_DEFAULT_TAG))
    if definition is None:
        raise ModelNotFound(
            f"The model {name[:100]!r} does not exist; GET /v1/models lists them", field="model"
        )
    return definition
