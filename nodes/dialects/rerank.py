"""`POST /v1/rerank`: documents in the order of their relevance to a query, in Jina's form."""

from typing import Annotated, Any

import msgspec
import orjson

from localai_cluster.kit import clock
from localai_cluster.rpc.client import BackendClient
from localai_cluster.rpc.messages import RerankRequest, RerankResult
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer
from nodes.dialects.openai_bodies import PositiveInt, Text
from nodes.gateway import gateway
from nodes.gateway.model_lookup import defined
from nodes.gateway.request import InferenceRequest
from nodes.gateway.streams import node_header

MOST_DOCUMENTS = 2048


class RerankDocument(msgspec.Struct, frozen=True):
    """A document."""

    text: str


class RerankBody(msgspec.Struct, frozen=True):
    """The body of a request."""

    model: Text
    query: Text
    documents: Annotated[list[str | RerankDocument], msgspec.Meta(min_length=1, max_length=MOST_DOCUMENTS)]
    top_n: PositiveInt | None = None
    return_documents: bool | None = None

    @property
    def texts(self) -> list[str]:
        """The documents' texts."""
        return [document if isinstance(document, str) else document.text for document in self.documents]


async def rerank(request: InferenceRequest) -> Answer:
    """Rank the documents of one request."""
    body = wire.typed(wire.json_object(request.body), RerankBody)
    definition = await defined(body.model)
    request.model = definition.name
    call = RerankRequest(
        query=body.query, documents=body.texts, top_n=body.top_n or 0, ModelIdentity=definition.model
    )

    async def work(engine: BackendClient) -> RerankResult:
        return await engine.rerank(call, request.deadline - clock.monotonic())

    result = await gateway.current().run(request, work)
    return Answer(orjson.dumps(render_ranking(body, result)), headers=tuple(node_header(request)))


def render_ranking(body: RerankBody, result: RerankResult) -> dict[str, Any]:
    """Return the response: the best documents first, at most `top_n` even if the engine sends more."""
    best = sorted(result.results, key=lambda document: document.relevance_score, reverse=True)
    entries = []
    for document in best[: body.top_n]:
        entry: dict[str, Any] = {"index": document.index, "relevance_score": document.relevance_score}
        if body.return_documents is not False:
            entry["document"] = {"text": document.text}
        entries.append(entry)
    usage = {"total_tokens": result.usage.total_tokens, "prompt_tokens": result.usage.prompt_tokens}
    return {"model": body.model, "usage": usage, "results": entries}
