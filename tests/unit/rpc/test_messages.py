"""The messages on the wire: names and numbers of LocalAI's `backend` package."""

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message as ProtobufMessage

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc import messages
from localai_cluster.rpc.client import options_from_mapping
from localai_cluster.rpc.messages import (
    ModelOptions,
    PredictOptions,
)

# A cold load and a chat as the reference sent them.
RECORDED_LOAD = {
    "Model": "mock.bin",
    "ContextSize": 2048,
    "Seed": 18195050,
    "NBatch": 512,
    "MMap": True,
    "Embeddings": True,
    "NGPULayers": 99999999,
    "Threads": 2,
    "ModelFile": "/srv/w2/models/glog/mock.bin",
    "FlashAttention": "auto",
    "ModelPath": "/srv/w2/models/glog",
}


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (
            PredictOptions,
            {"Prompt": 1, "MLock": 25, "TopP": 32, "Embeddings": 36, "MinP": 53, "ModelIdentity": 54},
        ),
        (
            ModelOptions,
            {"Model": 1, "Threads": 15, "CLIPSkip": 33, "ControlNet": 48, "Options": 62, "EnableScore": 75},
        ),
        (messages.Reply, {"message": 1, "tokens": 2, "prompt_tokens": 3, "chat_deltas": 8}),
        (messages.EmbeddingResult, {"embeddings": 1, "tokens": 2, "dim": 3, "prompt_tokens": 4, "layout": 5}),
        (messages.Result, {"message": 1, "success": 2}),
        (messages.StatusResponse, {"state": 1, "memory": 2}),
        (messages.ProxyOptions, {"upstream_url": 1, "cache_prompt": 8}),
    ],
)
def test_field_numbers(message: type[ProtobufMessage], numbers: dict[str, int]) -> None:
    """The field number is the contract."""
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: fields[name].number for name in numbers} == numbers


def test_methods() -> None:
    """Every method the cluster calls, under the package's full name."""
    service = PredictOptions.DESCRIPTOR.file.services_by_name["Backend"]
    assert service.full_name == "backend.Backend"
    streams = {method.name: method.server_streaming for method in service.methods}
    streamed = {name for name, streaming in streams.items() if streaming}
    assert streamed == {"PredictStream", "AudioTranscriptionStream", "TTSStream"}
    assert set(streams) >= {"Health", "LoadModel", "Predict", "Embedding", "TokenizeString", "Status", "Free"}


def test_load_options_survive_storage() -> None:
    """Options are stored as plain data under the contract's names."""
    options = options_from_mapping(RECORDED_LOAD)
    assert json_format.MessageToDict(options, preserving_proto_field_name=True) == RECORDED_LOAD


@pytest.mark.parametrize("mapping", [{"Modell": "a"}, {"ContextSize": "many"}, {"Options": "a:b"}])
def test_bad_load_options_name_the_field(mapping: dict[str, object]) -> None:
    """A definition with an unknown or ill-typed option is refused, not half understood."""
    with pytest.raises(InvalidInput) as caught:
        options_from_mapping(mapping)
    assert caught.value.field == "options"
    assert next(iter(mapping)) in caught.value.message
