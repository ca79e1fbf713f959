"""What became of approvals, as REST answers it and the command line prints it."""

from collections.abc import Sequence

from localai_cluster.web.shapes import TEXT, UUID, Row, Shape, count, field
from nodes.registry.services import Approved, Outcome
from nodes.registry.shape import NODE_STATUS, NODE_TYPE

APPROVED = Shape(
    "Approved",
    "The answer to an approval; an agent's token is shown this once.",
    [
        field("id", UUID),
        field("name", TEXT),
        field("node_type", NODE_TYPE.ref),
        field("status", NODE_STATUS.ref),
        field("message", TEXT),
        field("api_token", TEXT, optional=True),
    ],
)
OUTCOME = Shape(
    "Outcome",
    "What became of one of them; `name` and `status` if it worked, otherwise `error`.",
    [
        field("id", UUID),
        field("name", TEXT, optional=True),
        field("status", NODE_STATUS.ref, optional=True),
        field("api_token", TEXT, "An agent's, shown this once.", optional=True),
        field("error", TEXT, optional=True),
    ],
)
OUTCOMES = Shape(
    "Outcomes",
    "How many were approved, and each in the order asked for.",
    [field("approved", count()), field("results", OUTCOME.many)],
)


def approved(found: Approved) -> Row:
    """The answer to one approval."""
    node = found.node
    return APPROVED.of(
        id=node.id,
        name=node.name,
        node_type=node.node_type,
        status=node.status,
        message="node approved",
        api_token=found.api_token,
    )


def outcomes(found: Sequence[Outcome]) -> Row:
    """The answer to several."""
    results = [
        OUTCOME.of(id=one.id, error=one.error)
        if one.error
        else OUTCOME.of(id=one.id, name=one.name, status=one.status, api_token=one.api_token)
        for one in found
    ]
    return OUTCOMES.of(approved=sum(not one.error for one in found), results=results)
