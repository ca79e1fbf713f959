"""`POST /v1/rerank`: documents in the order of their relevance to a query, as Jina's clients ask for it."""

from typing import Annotated, Any

import msgspec
import orjson

from localai_cluster import clock
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import RerankRequest, RerankResult
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.inference import gateway
from nodes.inference.defined import defined
from nodes.inference.openai_bodies import Count, Text
from nodes.inference.streams import node_header
from nodes.routing.request import InferenceRequest

MOST_DOCUMENTS = 2048


class RerankDocument(msgspec.Struct, frozen=True):
    """A document."""

    text: str


class RerankBody(msgspec.Struct, frozen=True):
    """The body of a request."""

    model: Text
    query: Text
    documents: Annotated[list[str | RerankDocument], msgspec.Meta(min_length=1, max_length=MOST_DOCUMENTS)]
    top_n: Count | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]


async def rerank(request: InferenceRequest) -> Answer:
    """Answers one request."""
    body = wire.typed(wire.json_object(request.body), RerankBody)
    definition = await defined(body.model)
    request.model = definition.name
    asked = RerankRequest(
        query=body.query, documents=body.texts, top_n=body.top_n or 0, ModelIdentity=definition.model
    )

    async def work(engine: BackendClient) -> RerankResult:
        return await engine.rerank(asked, request.deadline - clock.monotonic())

    result = await gateway.current().run(request, work)
    return Answer(orjson.dumps(render(body, result)), headers=tuple(node_header(request)))


def render(body: RerankBody, result: RerankResult) -> dict[str, Any]:
    """The answer: the best first, no more than were asked for, whatever the engine sends."""
    best = sorted(result.results, key=lambda one: one.relevance_score, reverse=True)
    told = []
    for one in best[: body.top_n]:
        entry: dict[str, Any] = {"index": one.index, "relevance_score": one.relevance_score}
        if body.return_documents is not False:
            entry["document"] = {"text": one.text}
        told.append(entry)
    usage = {"total_tokens": result.usage.total_tokens, "prompt_tokens": result.usage.prompt_tokens}
    return {"model": body.model, "usage": usage, "results": told}
