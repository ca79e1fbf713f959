"""The benefit of routing by prefix on real engines: cached prompt tokens, and time to the first token.

`python -m tests.benchmarks.bench_prefix [--rounds N] [--clients N] [--runs N]` starts parts of a temporary
cluster (servers, a web process for each policy, two llama.cpp engines with two slots and no other cache). It
sends shuffled questions that begin with one of four texts of about 1,000 tokens. In each run the policies
follow each other on the same engines, each with its own texts, so that no policy finds cached texts of
another. Compare figures of one call only.
"""

import argparse
import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import mean, median

import httpx

from localai_cluster.kit import clock
from localai_cluster.rpc.client import BackendClient, options_from_mapping
from nodes.definitions.files import read_definition
from tests.benchmarks import planted
from tests.support import backends
from tests.support.cluster import ADMIN_KEY, ROOT, Cluster, Process, running_cluster

MODEL = "smollm2"
PREFIXES, WORDS = 4, 960
POLICIES = {"round robin": "false", "by prefix": "true"}
_WORDS = (
    "node",
    "model",
    "time",
    "question",
    "answer",
    "water",
    "house",
    "light",
    "paper",
    "river",
    "garden",
)


@dataclass
class Told:
    """The measurements of one policy's answers; times in milliseconds."""

    prompt: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Return the fraction of the prompts' tokens that were cached."""
        return sum(self.cached) / sum(self.prompt)

    @property
    def p90(self) -> float:
        """Return the 90th percentile of the time to the first token, in milliseconds."""
        return sorted(self.first)[len(self.first) * 9 // 10]

    def line(self, policy: str) -> str:
        """Return the figures as one line."""
        return (
            f"{policy:<12}: {len(self.first)} questions of {mean(self.prompt):.0f} tokens, {self.share:.0%}"
            f" cached; first token p50 {median(self.first):.0f} ms, p90 {self.p90:.0f} ms"
        )


def texts(policy: str, chance: random.Random) -> list[str]:
    """Return the beginnings of prompts for one policy."""
    return [
        f"You are assistant {number} for {policy}. " + " ".join(chance.choices(_WORDS, k=WORDS))
        for number in range(PREFIXES)
    ]


async def ask(client: httpx.AsyncClient, web: Process, text: str, question: str, told: Told) -> None:
    """Send one streamed question."""
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 4, "stream": True, "temperature": 0}
    body["stream_options"] = {"include_usage": True}
    began, first = clock.monotonic(), 0.0
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with client.stream("POST", f"{web.url}/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first and any(one["delta"].get("content") for one in chunk["choices"]):
                first = clock.monotonic() - began
            if usage := chunk.get("usage"):
                told.prompt.append(usage["prompt_tokens"])
                told.cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    told.first.append(1000 * first)


async def play(policy: str, web: Process, rounds: int, clients: int, number: int) -> Told:
    """Ask so many rounds of all texts, after one uncounted round in which nothing can be cached."""
    chance, found = random.Random(number), Told()
    beginnings = texts(policy, chance)
    async with httpx.AsyncClient(timeout=120) as client:
        for turn in range(rounds + 1):
            order = [text for text in beginnings for _ in range(2)]
            chance.shuffle(order)
            questions = [(text, f"Question {turn} {number}?") for number, text in enumerate(order)]
            await _asked(client, web, questions, clients, found if turn else Told())
    return found


async def _asked(
    client: httpx.AsyncClient, web: Process, questions: Sequence[tuple[str, str]], clients: int, told: Told
) -> None:
    left = iter(questions)

    async def one() -> None:
        for text, question in left:
            await ask(client, web, text, question, told)

    await asyncio.gather(*(one() for _ in range(clients)))


@asynccontextmanager
async def engines() -> AsyncIterator[list[str]]:
    """Yield the addresses of engines with the model loaded: two slots, and no cache of earlier prompts."""
    options = options_from_mapping(read_definition(ROOT / "examples" / "models" / f"{MODEL}.yaml").options)
    options.ModelFile = str(ROOT / "build" / "models" / options.Model)
    del options.Options[:]
    options.Options.extend(["parallel:2", "cache_ram_mib:0"])
    async with backends.running_backend("llama-cpp") as one, backends.running_backend("llama-cpp") as two:
        for engine in (one, two):
            client = BackendClient(engine.address, backends.TOKEN)
            result = await client.load_model(options, 60.0)
            await client.close()
            assert result.success, result.message
        yield [one.address, two.address]


def rows(addresses: Sequence[str]) -> None:
    """Insert a healthy node for each engine, with its replica."""
    from nodes.models import BackendNode, NodeModel

    ids = planted.plant(planted.processes(len(addresses)))
    BackendNode.objects.update(engine_token=backends.TOKEN)
    NodeModel.objects.bulk_create(
        NodeModel(node_id=id, model_name=MODEL, address=address, phase="serving")
        for id, address in zip(ids, addresses, strict=True)
    )


async def run(cluster: Cluster, rounds: int, clients: int, runs: int) -> None:
    """Print the figures of both policies, for each run and for all runs."""
    found: dict[str, list[Told]] = {policy: [] for policy in POLICIES}
    async with engines() as addresses:
        await asyncio.to_thread(rows, addresses)
        webs = {
            policy: await asyncio.to_thread(cluster.web, LOCALAI_DISTRIBUTED_PREFIX_CACHE=on)
            for policy, on in POLICIES.items()
        }
        for number in range(1, runs + 1):
            # In turn, so that a load that grows or falls does not favour one of them.
            for policy, web in list(webs.items())[:: 1 if number % 2 else -1]:
                found[policy].append(await play(policy, web, rounds, clients, number))
                print(f"run {number}, {found[policy][-1].line(policy)}", flush=True)
    for name in ("share", "p90"):
        plain, by_prefix = (median(getattr(told, name) for told in found[policy]) for policy in POLICIES)
        print(f"{name}, median of the runs: {plain:.4g}, by prefix {by_prefix:.4g} ({by_prefix / plain:.2f})")


def main() -> None:
    """Run the whole benchmark."""
    options = argparse.ArgumentParser(description="Measures routing by prefix on real engines.")
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--clients", type=int, default=1)
    options.add_argument("--runs", type=int, default=1)
    chosen = options.parse_args()
    with running_cluster(CLUSTER_NODE_STALE_AFTER="24h", CLUSTER_NODE_GONE_AFTER="24h") as cluster:
        planted.set_up(cluster)
        asyncio.run(run(cluster, chosen.rounds, chosen.clients, chosen.runs))


if __name__ == "__main__":
    main()
