"""Results of approvals, as REST returns them and the command line prints them."""

from collections.abc import Sequence

from localai_cluster.web.shapes import TEXT, Row, Shape, count, field
from localai_cluster.web.shapes import UUID as UUID_SCHEMA
from nodes.registry.services import Approved, Outcome
from nodes.registry.shape import NODE_STATUS, NODE_TYPE

APPROVED = Shape(
    "Approved",
    "The answer to an approval; an agent's token is shown this once.",
    [
        field("id", UUID_SCHEMA),
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
        field("id", UUID_SCHEMA),
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


def approved(approval: Approved) -> Row:
    """Return the response to one approval."""
    node = approval.node
    return APPROVED.of(
        id=node.id,
        name=node.name,
        node_type=node.node_type,
        status=node.status,
        message="node approved",
        api_token=approval.api_token,
    )


def outcomes(results: Sequence[Outcome]) -> Row:
    """Return the response to several approvals."""
    rows = [
        OUTCOME.of(id=result.id, error=result.error)
        if result.error
        else OUTCOME.of(id=result.id, name=result.name, status=result.status, api_token=result.api_token)
        for result in results
    ]
    return OUTCOMES.of(approved=sum(not result.error for result in results), results=rows)
