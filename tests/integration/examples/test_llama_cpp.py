"""The llama.cpp engine with a real model: what the fields of the contract do, and that work ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from localai_cluster.rpc.generated import backend_pb2 as pb
from localai_cluster.rpc.generated.backend_pb2_grpc import BackendStub
from nodes.gateway import gbnf
from tests.conftest import until
from tests.support.backends import ROOT, TOKEN, gallery, running_backend

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE = ROOT / "build" / "models" / MODEL
LIMIT = 300.0
"""Seconds for one call; a prompt of 1,024 tokens takes more than a minute on a busy machine."""
BATCH = 64
PARIS = pb.Message(role="user", content="What is the weather in Paris?")
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
        {"type": "function", "function": {"name": "get_time"}},
    ]
)
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Engine:
    """The engine under test, and what a call left behind."""

    stub: Any
    """A `BackendStub`, whose types are those of calls that block."""
    metadata: Sequence[tuple[str, str]] = (("authorization", f"Bearer {TOKEN}"),)

    async def call(self, method: str, request: Any) -> Any:
        """One call with one answer."""
        return await getattr(self.stub, method)(request, timeout=LIMIT, metadata=self.metadata)

    async def said(self, request: pb.PredictOptions) -> tuple[pb.Reply, dict[str, Any]]:
        """The whole answer and its trailing metadata."""
        call = self.stub.Predict(request, timeout=LIMIT, metadata=self.metadata)
        return await call, dict(await call.trailing_metadata() or ())

    async def pieces(self, request: pb.PredictOptions) -> tuple[list[pb.Reply], dict[str, Any]]:
        """The streamed answer and its trailing metadata."""
        call = self.stub.PredictStream(request, timeout=LIMIT, metadata=self.metadata)
        return [piece async for piece in call], dict(await call.trailing_metadata() or ())

    def begin(self, request: pb.PredictOptions) -> Any:
        """A stream that the caller reads and cancels."""
        return self.stub.PredictStream(request, timeout=LIMIT, metadata=self.metadata)

    async def refused(self, method: str, request: Any) -> tuple[grpc.StatusCode, str]:
        """The status and text of a call that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method, request)
        return caught.value.code(), caught.value.details() or ""

    async def idle(self) -> bool:
        """Whether llama.cpp works on nothing."""
        return await self.running() == 0

    async def running(self) -> int:
        """Requests that llama.cpp works on."""
        status = await self.call("Status", pb.HealthMessage())
        return int(status.memory.breakdown["requests_running"])


def load_options(**changes: Any) -> pb.ModelOptions:
    """Two slots that remember nothing but their last prompt."""
    options = pb.ModelOptions(Model=MODEL, ModelFile=str(FILE), ContextSize=1024, Threads=1, NBatch=BATCH)
    options.Options.extend(["parallel:2", "cache_ram_mib:0"])
    options.MergeFrom(pb.ModelOptions(**changes))
    return options


def prompt(text: str, *, tokens: int = 8, **changes: Any) -> pb.PredictOptions:
    """A completion without chance."""
    return pb.PredictOptions(Prompt=text, Tokens=tokens, PromptCacheAll=True, ModelIdentity=MODEL, **changes)


def chat(*messages: pb.Message, tokens: int = 8, **changes: Any) -> pb.PredictOptions:
    """A chat without chance."""
    return pb.PredictOptions(
        Messages=messages or (PARIS,),
        UseTokenizerTemplate=True,
        Tokens=tokens,
        PromptCacheAll=True,
        **changes,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    """The engine with the model."""
    gallery()
    async with (
        running_backend("llama-cpp") as backend,
        grpc.aio.insecure_channel(backend.address) as channel,
    ):
        engine = Engine(BackendStub(channel))
        result = await engine.call("LoadModel", load_options())
        assert result.success, result.message
        yield engine


async def test_a_whole_answer_and_its_figures(engine: Engine) -> None:
    """The template's text is counted; a repeated prompt is remembered but for its last token."""
    first, _ = await engine.said(chat())
    again, trailing = await engine.said(chat())
    assert first.message == again.message != b""
    assert first.message.decode() == first.chat_deltas[0].content
    assert (first.tokens, first.prompt_tokens) == (again.tokens, again.prompt_tokens) == (8, 37)
    assert first.timing_prompt_processing > 0 < first.timing_token_generation
    assert trailing["localai-cached-tokens"] == "36"
    assert trailing["localai-finish-reason"] == "length"


async def test_a_stream_is_the_same_answer_in_pieces(engine: Engine) -> None:
    """Each piece counts the tokens so far; the last one has no text."""
    whole, _ = await engine.said(chat())
    pieces, trailing = await engine.pieces(chat())
    assert b"".join(piece.message for piece in pieces) == whole.message
    assert "".join(delta.content for piece in pieces for delta in piece.chat_deltas) == whole.message.decode()
    assert [piece.tokens for piece in pieces] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert {piece.prompt_tokens for piece in pieces} == {37}
    assert trailing["localai-cached-tokens"] == "36"


async def test_a_rendered_prompt_is_the_same_as_messages(engine: Engine) -> None:
    """The model's own template, rendered elsewhere, is read with its special tokens."""
    metadata = await engine.call("ModelMetadata", load_options())
    assert not metadata.supports_thinking
    rendered = metadata.rendered_template.replace("Hello", PARIS.content)
    whole, trailing = await engine.said(prompt(rendered))
    assert whole.message == (await engine.said(chat()))[0].message
    assert not whole.chat_deltas
    assert (whole.tokens, whole.prompt_tokens, trailing["localai-finish-reason"]) == (8, 37, "length")


async def test_seed_stop_and_bias(engine: Engine) -> None:
    """The same seed gives the same text, another one another; a stop text ends the answer before itself."""

    async def text(**changes: Any) -> bytes:
        return (await engine.said(prompt("Once upon a time", **changes)))[0].message

    hot = {"Temperature": 1.5, "TopP": 0.95}
    drawn = [await text(Seed=seed, **hot) for seed in (7, 7, 8)]
    assert drawn[0] == drawn[1] != drawn[2]
    counted, trailing = await engine.said(prompt("1, 2, 3, 4,", StopPrompts=["7"]))
    assert counted.message == b" 5, 6, "
    assert (trailing["localai-finish-reason"], trailing["localai-stop-word"]) == ("stop", '"7"')
    for words in (["\n", "é"], ["x"]):
        _, trailing = await engine.said(chat(tokens=40, StopPrompts=words))
        assert trailing.get("localai-stop-word") in (None, json.dumps(words[0]))
    five = (await engine.call("TokenizeString", prompt("5"))).tokens[0]
    biased, _ = await engine.said(prompt("1, 2, 3, 4,", LogitBias=json.dumps({five: -100})))
    assert not biased.message.startswith(b" 5")


async def test_a_schema_and_a_grammar_bind_the_answer(engine: Engine) -> None:
    """Grammar is GBNF, or a JSON schema; both for messages and for a prompt. A schema of a request comes as
    GBNF too, for engines that read nothing else."""
    schema = json.dumps(CITY)
    made = gbnf.from_schema(CITY)
    both = {"Grammar": made, "Metadata": {"json_schema": schema}}
    for request in (
        chat(tokens=40, Grammar=schema),
        prompt("The city is", tokens=40, Grammar=schema),
        chat(tokens=40, Grammar=made),
        prompt("The city is", tokens=40, **both),
    ):
        answer, trailing = await engine.said(request)
        assert set(json.loads(answer.message)) == {"city"}
        assert trailing["localai-finish-reason"] == "stop"
    for request in (chat(Grammar='root ::= "yes" | "no"'), prompt("Sky?", Grammar='root ::= "yes" | "no"')):
        assert (await engine.said(request))[0].message in (b"yes", b"no")


@pytest.mark.parametrize(
    ("choice", "name", "arguments"),
    [
        ("required", "get_weather", {"city"}),
        ('{"type": "function", "function": {"name": "get_weather"}}', "get_weather", {"city"}),
        ('{"type": "function", "function": {"name": "get_time"}}', "get_time", set()),
    ],
    ids=["any", "weather", "time"],
)
async def test_a_forced_tool_is_called(engine: Engine, choice: str, name: str, arguments: set[str]) -> None:
    """Although this model's template has no place for tools: one call whose arguments fit, and no text."""
    forced = chat(tokens=60, Tools=TOOLS, ToolChoice=choice, Metadata={"parallel_tool_calls": "false"})
    pieces, trailing = await engine.pieces(forced)
    calls = [call for piece in pieces for delta in piece.chat_deltas for call in delta.tool_calls]
    assert [call.name for call in calls if call.name] == [name]
    assert len({call.id for call in calls} - {""}) == 1
    assert set(json.loads("".join(call.arguments for call in calls))) == arguments
    assert not any(piece.message for piece in pieces)
    assert trailing["localai-finish-reason"] == "tool_calls"
    whole, _ = await engine.said(forced)
    (call,) = whole.chat_deltas[0].tool_calls
    assert (call.name, whole.message) == (name, b"")
    json.loads(call.arguments)


async def test_several_tools_are_called(engine: Engine) -> None:
    """C11: `required` makes as many calls as the model likes, each with its id; a stop word cuts none."""
    request = chat(tokens=200, Tools=TOOLS, ToolChoice="required", StopPrompts=["city", "get"])
    whole, trailing = await engine.said(request)
    calls = whole.chat_deltas[0].tool_calls
    assert [call.index for call in calls] == list(range(len(calls)))
    assert len({call.id for call in calls}) == len(calls) > 1
    for call in calls:
        keys = {"get_weather": {"city"}, "get_time": set()}[call.name]
        assert set(json.loads(call.arguments)) == keys
    assert trailing["localai-finish-reason"] == "tool_calls"
    pieces, _ = await engine.pieces(request)
    told = [call for piece in pieces for delta in piece.chat_deltas for call in delta.tool_calls]
    for call in calls:
        parts = [one for one in told if one.index == call.index]
        assert [one.name for one in parts if one.name] == [call.name]
        assert "".join(one.arguments for one in parts) == call.arguments
    cut, trailing = await engine.said(chat(tokens=18, Tools=TOOLS, ToolChoice="required"))
    (call,) = cut.chat_deltas[0].tool_calls
    assert (call.name, trailing["localai-finish-reason"]) == ("get_weather", "length")


async def test_a_call_that_repeats_another_ends_the_answer(engine: Engine) -> None:
    """C11: a small model makes the same call again and again; here it can hardly end the list."""
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = json.dumps([{"type": "function", "function": {"name": "weather", "parameters": place}}])
    ends = [(await engine.call("TokenizeString", prompt(text))).tokens[-1] for text in ("]", "}]")]
    bias = json.dumps(dict.fromkeys(ends, -100))
    rome = pb.Message(role="user", content="Weather in Rome?")
    request = chat(rome, tokens=300, Tools=tool, ToolChoice="required", LogitBias=bias)
    whole, trailing = await engine.said(request)
    calls = [(call.name, call.arguments) for call in whole.chat_deltas[0].tool_calls]
    assert calls == [("weather", '{"city": "Rome"}')]
    assert trailing["localai-finish-reason"] == "tool_calls"
    assert 0 < whole.tokens < 100
    assert whole.prompt_tokens > int(trailing["localai-cached-tokens"]) >= 0
    pieces, _ = await engine.pieces(request)
    told = [call for piece in pieces for delta in piece.chat_deltas for call in delta.tool_calls]
    assert [call.name for call in told if call.name] == ["weather"]
    await until(engine.idle, what="the rest is not generated")


OPEN = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "at": {"$ref": "#/$defs/at"}},
    "required": ["city", "at"],
    "$defs": {"at": {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]}},
}


async def test_an_object_has_only_its_named_properties(engine: Engine) -> None:
    """C4: as in the GBNF that other engines get; a small model would invent some."""
    answer, _ = await engine.said(chat(tokens=80, Grammar=json.dumps(OPEN)))
    told = json.loads(answer.message)
    assert (set(told), set(told["at"])) == ({"city", "at"}, {"day"})
    tool = json.dumps([{"type": "function", "function": {"name": "f", "parameters": OPEN}}])
    whole, _ = await engine.said(chat(tokens=80, Tools=tool, ToolChoice="required"))
    assert set(json.loads(whole.chat_deltas[0].tool_calls[0].arguments)) == {"city", "at"}


async def test_tools_that_the_template_cannot_show_are_refused(engine: Engine) -> None:
    """C3: never thrown away silently; without the choice, results of tools are read as messages."""
    code, text = await engine.refused("Predict", chat(tokens=12, Tools=TOOLS))
    assert (code, text.partition(":")[0]) == (grpc.StatusCode.INVALID_ARGUMENT, "Tools")
    told = [
        PARIS,
        pb.Message(role="assistant", tool_calls=json.dumps([CALL])),
        pb.Message(role="tool", tool_call_id="1", name="get_weather", content="sunny"),
    ]
    answer, _ = await engine.said(chat(*told, tokens=12, Tools=TOOLS, ToolChoice="none"))
    assert answer.message
    assert not answer.chat_deltas[0].tool_calls


@pytest.mark.parametrize(
    ("request_", "alternatives"),
    [
        (chat(Logprobs=1), 0),
        (chat(Logprobs=1, TopLogprobs=2), 2),
        (prompt("Paris is", Logprobs=1), 1),
        (prompt("Paris is", Logprobs=1, TopLogprobs=2), 2),
    ],
    ids=["chat", "chat-2", "prompt", "prompt-2"],
)
async def test_logprobs(engine: Engine, request_: pb.PredictOptions, alternatives: int) -> None:
    """As OpenAI writes them, one for each token, in whole answers and in pieces."""
    whole, _ = await engine.said(request_)
    pieces, _ = await engine.pieces(request_)
    listed = json.loads(whole.logprobs)["content"]
    assert [len(one["top_logprobs"]) for one in listed] == [alternatives] * 8
    assert "".join(one["token"] for one in listed).encode() == whole.message
    assert all(one["logprob"] <= 0 for one in listed)
    apart = [one for piece in pieces if piece.logprobs for one in json.loads(piece.logprobs)["content"]]
    assert [one["token"] for one in apart] == [one["token"] for one in listed]


async def test_tokens_and_text(engine: Engine) -> None:
    """There and back; a number that is no token is the client's error."""
    told = await engine.call("TokenizeString", prompt("Hello <|im_end|> wörld"))
    assert told.length == len(told.tokens) > 3
    back = await engine.call("Detokenize", pb.DetokenizeRequest(tokens=told.tokens))
    assert back.content == "Hello <|im_end|> wörld"
    code, _ = await engine.refused("Detokenize", pb.DetokenizeRequest(tokens=[10**6]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (prompt("word " * 1100), "context size"),
        (prompt("x", Grammar="root ::= ("), "grammar"),
        (prompt("x", Grammar='{"type": "nonsense"}'), "Invalid type: nonsense"),
        (chat(Grammar='{"not": {"type": "string"}}'), "not"),
        (chat(Grammar="{" * 9), "Grammar is not JSON"),
        (prompt("x", LogitBias="[1]"), "LogitBias"),
        (prompt("x", Logprobs=1, TopLogprobs=21), "TopLogprobs"),
        (prompt("x", Images=["AAAA"]), "media"),
        (chat(Images=["AAAA"]), "image"),
        (chat(Images=["http://127.0.0.1/x.png"]), "Images"),
        (chat(Tools="x"), "Tools"),
        (chat(Tools="[{}]"), "Tools"),
        (chat(Tools='[{"name": "f", "parameters": {"type": "string"}}]', ToolChoice="required"), "Tools"),
        (chat(Tools=TOOLS, ToolChoice="maybe"), "ToolChoice"),
        (chat(Tools=TOOLS, ToolChoice='{"function": {"name": "x"}}'), "ToolChoice"),
        (chat(pb.Message(role="assistant", tool_calls="{")), "tool_calls"),
        (prompt("x", Temperature=-1, Penalty=-1), "penalty"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
async def test_what_cannot_be_honoured_is_refused(engine: Engine, request_: Any, says: str) -> None:
    """Never ignored: the status is INVALID_ARGUMENT and its text names the reason."""
    code, text = await engine.refused("Predict", request_)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert says in text


async def test_two_requests_take_turns_and_a_third_one_waits(engine: Engine) -> None:
    """Two slots: their tokens come in turn; the third is answered too."""
    order: list[int] = []

    async def read(number: int) -> None:
        async for _ in engine.begin(prompt(f"Story {number}:", IgnoreEOS=True)):
            order.append(number)

    await asyncio.gather(*(read(number) for number in (1, 2, 3)))
    waited = order[-1]
    one, other = {1, 2, 3} - {waited}
    last = {number: len(order) - 1 - order[::-1].index(number) for number in (one, other)}
    # On a busy machine its first pieces may be read before the last ones of the one that it waited for.
    early = order[: min(last.values())].count(waited)
    assert early < order.count(waited) / 2, "the third one waited for a slot"
    assert order.index(one) < last[other]
    assert order.index(other) < last[one]


async def test_a_cancelled_stream_ends_its_work(engine: Engine) -> None:
    """Once tokens flow the work ends long before its 900 tokens, and the slot is free."""
    call = engine.begin(prompt("Once upon", tokens=900, IgnoreEOS=True))
    await anext(aiter(call))
    assert await engine.running() == 1
    call.cancel()
    # A machine that is busy with something else writes the 900 more slowly too.
    await until(engine.idle, seconds=0.5)


async def test_a_cancelled_whole_answer_ends_its_work(engine: Engine) -> None:
    """It is streamed inside, so it ends as a stream does."""
    answering = asyncio.ensure_future(engine.said(prompt("Once upon", tokens=900, IgnoreEOS=True)))

    async def begun() -> bool:
        return await engine.running() == 1

    await until(begun)
    answering.cancel()
    await until(engine.idle, seconds=0.5)


async def test_a_cancelled_prompt_ends_with_its_batch(engine: Engine) -> None:
    """Before the first token the work ends after the batch that is being read, not with the whole prompt."""
    request = prompt(" ".join(str(number) for number in range(110)), tokens=1)
    reading = asyncio.ensure_future(engine.said(request))

    async def begun() -> bool:
        return await engine.running() == 1

    await until(begun)
    reading.cancel()
    await until(engine.idle)
    answer, trailing = await engine.said(request)
    assert int(trailing.get("localai-cached-tokens", 0)) < answer.prompt_tokens - BATCH


async def test_a_file_that_is_no_model(engine: Engine, tmp_path: Path) -> None:
    """The refusal names the file and what is wrong; the next load works."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(FILE.read_bytes()[:100_000])
    text = tmp_path / "text.gguf"
    text.write_text("no model")
    for path, says in (
        (tmp_path / "absent.gguf", "No such file"),
        (text, "is not a GGUF file"),
        (broken, "cannot load broken.gguf"),
    ):
        result = await engine.call("LoadModel", load_options(ModelFile=str(path)))
        assert not result.success
        assert says in result.message
    wrong = load_options()
    wrong.Options.append("parallel:many")
    result = await engine.call("LoadModel", wrong)
    assert "'parallel'" in result.message


async def test_embeddings_and_ranks(engine: Engine) -> None:
    """Vectors of length one from a text or its tokens; ranks only where the model was loaded for them."""
    assert (await engine.call("LoadModel", load_options(Embeddings=True))).success
    text = await engine.call("Embedding", pb.PredictOptions(Embeddings="a cat"))
    tokens = (await engine.call("TokenizeString", prompt("a cat"))).tokens
    same = await engine.call("Embedding", pb.PredictOptions(EmbeddingTokens=tokens))
    assert text.dim == len(text.embeddings) == 576
    assert text.embeddings == pytest.approx(same.embeddings, abs=1e-5)
    assert sum(value * value for value in text.embeddings) == pytest.approx(1.0, abs=1e-4)
    ids = (await engine.call("TokenizeString", prompt("word " * 1100))).tokens
    for long in (pb.PredictOptions(Embeddings="word " * 1100), pb.PredictOptions(EmbeddingTokens=ids)):
        assert (await engine.call("Embedding", long)).tokens == 1024, "C9: cut"
        long.Metadata["truncate"] = "false"
        code, told = await engine.refused("Embedding", long)
        assert (code, "longer than the 1024 tokens" in told) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    assert text.prompt_tokens == len(tokens)
    code, _ = await engine.refused("Rerank", pb.RerankRequest(query="cat", documents=["dog"]))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert (await engine.call("LoadModel", load_options(Reranking=True))).success
    ranked = await engine.call(
        "Rerank", pb.RerankRequest(query="cat", documents=["dog", "cat", "x"], top_n=2)
    )
    assert len(ranked.results) == 2
    assert ranked.results[0].relevance_score >= ranked.results[1].relevance_score
    assert ["dog", "cat", "x"][ranked.results[0].index] == ranked.results[0].text


async def test_free_ends_what_runs(engine: Engine) -> None:
    """A stream under way ends as one whose model is gone; memory is given back; a load brings it back."""
    assert (await engine.call("LoadModel", load_options())).success
    assert (await engine.call("LoadModel", load_options(Seed=5))).success
    before = (await engine.call("Status", pb.HealthMessage())).memory
    call = engine.begin(prompt("Once upon", tokens=900, IgnoreEOS=True))
    await anext(aiter(call))
    assert (await engine.call("Free", pb.HealthMessage())).success
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    after = (await engine.call("Status", pb.HealthMessage())).memory
    assert after.total < before.total
    assert after.breakdown["weights"] == 0 < before.breakdown["weights"]
    code, _ = await engine.refused("Predict", prompt("x"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert (await engine.call("LoadModel", load_options())).success
