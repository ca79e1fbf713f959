"""`POST /v1/images/generations`: generates images for a prompt; the response contains them in base64."""

import asyncio
import base64
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec

from localai_cluster.kit import clock
from localai_cluster.kit.errors import InvalidInput
from localai_cluster.rpc.errors import BackendFailed
from localai_cluster.rpc.messages import GenerateImageRequest
from localai_cluster.web import wire
from localai_cluster.web.wire import Answer, ResponseBody
from nodes.dialects import openai_common
from nodes.dialects.openai_common import Text
from nodes.gateway import gateway
from nodes.gateway.gateway import find_model
from nodes.gateway.request import InferenceRequest, node_header
from nodes.gateway.worker_files import open_files

MAX_IMAGES = 8
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Limit on the bytes of all images of a request, before base64."""
MAX_PROMPT_LENGTH = 32 * 1024
DEFAULT_SIDE, MIN_SIDE, MAX_SIDE = 512, 16, 4096
"""Default, minimum and maximum length of each side of an image in pixels."""
DEFAULT_STEPS = 15
"""Default number of diffusion steps, as in LocalAI."""
_MAX_SEED = 2**31 - 1
UNSUPPORTED_FIELDS = {
    "file": "images to begin from are not accepted",
    "image": "images to begin from are not accepted",
    "mask": "images to begin from are not accepted",
    "ref_images": "images to begin from are not accepted",
    "stream": "images are not sent in parts",
    "partial_images": "images are not sent in parts",
}

_PromptText = Annotated[str, msgspec.Meta(max_length=MAX_PROMPT_LENGTH)]
_StepCount = Annotated[int, msgspec.Meta(ge=1, le=1000)]


class ImagesBody(msgspec.Struct, kw_only=True, frozen=True):
    """The body of a request for images.

    `step`, `negative_prompt`, `seed` and `clip_skip` are fields of LocalAI's API.
    """

    model: Text
    prompt: Annotated[
        str,
        msgspec.Meta(
            min_length=1,
            max_length=MAX_PROMPT_LENGTH,
            description="What stands behind `|` is what shall not be seen.",
        ),
    ]
    negative_prompt: _PromptText | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_IMAGES)] | None = None
    size: Annotated[
        Annotated[str, msgspec.Meta(pattern="^([0-9]{2,4}x[0-9]{2,4}|auto)$")] | None,
        msgspec.Meta(description=f"Width and height, {MIN_SIDE} to {MAX_SIDE} pixels each."),
    ] = None
    response_format: Annotated[
        Literal["b64_json"] | None,
        msgspec.Meta(description="Images are inside the answer; the cluster keeps none to link to."),
    ] = None
    output_format: Literal["png"] | None = None
    step: _StepCount | None = None
    steps: _StepCount | None = None
    seed: int | None = None
    clip_skip: Annotated[int, msgspec.Meta(ge=0, le=100)] | None = None

    @property
    def pixels(self) -> tuple[int, int]:
        """Width and height in pixels. Raise InvalidInput if a side is too short or too long."""
        if self.size in (None, "auto"):
            return DEFAULT_SIDE, DEFAULT_SIDE
        width, height = (int(side) for side in str(self.size).split("x"))
        if not (MIN_SIDE <= width <= MAX_SIDE and MIN_SIDE <= height <= MAX_SIDE):
            raise InvalidInput(f"size: each side has {MIN_SIDE} to {MAX_SIDE} pixels", field="size")
        return width, height


class ImageBody(ResponseBody):
    b64_json: str


class ImagesResponse(ResponseBody):
    id: str
    created: int
    data: list[ImageBody]


async def generate(request: InferenceRequest) -> Answer:
    """Respond with the images for one prompt."""
    body = parse_request(wire.parse_json_object(request.body))
    definition = await find_model(request, body.model)
    calls = _engine_calls(body, definition.model, definition.generation.defaults)
    images = await _draw_images(request, calls)
    content = await asyncio.to_thread(
        render_response, request.request_id, int(clock.now().timestamp()), images
    )
    return Answer(content, headers=tuple(node_header(request)))


def parse_request(fields: Mapping[str, Any]) -> ImagesBody:
    """Parse the body of a request for images. Raise InvalidInput with the name of the first wrong field."""
    openai_common.refuse_fields(fields, UNSUPPORTED_FIELDS)
    if fields.get("response_format") == "url":
        raise InvalidInput(
            "response_format: no images are kept to link to; ask for b64_json", field="response_format"
        )
    body = wire.parse_struct(fields, ImagesBody)
    _ = body.pixels
    return body


def _engine_calls(
    body: ImagesBody, model: str, defaults: Mapping[str, float | int]
) -> list[GenerateImageRequest]:
    """Return one call to the engine for each image. The seeds are consecutive numbers."""
    width, height = body.pixels
    positive, _, negative = body.prompt.partition("|")
    base_seed = defaults.get("seed") if body.seed is None else body.seed
    seed = random.getrandbits(31) if base_seed in (None, -1) else int(base_seed or 0)
    return [
        GenerateImageRequest(
            width=width,
            height=height,
            step=body.step or body.steps or DEFAULT_STEPS,
            seed=(seed + number) & _MAX_SEED,
            positive_prompt=positive,
            negative_prompt=body.negative_prompt or negative,
            CLIPSkip=body.clip_skip or 0,
            ModelIdentity=model,
        )
        for number in range(body.n or 1)
    ]


async def _draw_images(request: InferenceRequest, calls: Sequence[GenerateImageRequest]) -> list[bytes]:
    """Generate the images one after another, because each image occupies the whole engine."""
    attempts = gateway.attempts(request)
    while True:
        async with attempts as engine, open_files(request) as files:
            images: list[bytes] = []
            for template in calls:
                call = GenerateImageRequest()
                call.CopyFrom(template)
                call.dst = await files.temp()
                result = await engine.draw(call, request.deadline - clock.monotonic())
                if not result.success:
                    raise BackendFailed(result.message or None)
                remaining = MAX_ANSWER_BYTES - sum(map(len, images))
                with await files.fetch(call.dst) as file:
                    images.append(file.read(remaining + 1))
                if len(images[-1]) > remaining:
                    raise BackendFailed(f"the images have more than {MAX_ANSWER_BYTES} bytes")
            return images


def render_response(identifier: str, created: int, images: Sequence[bytes]) -> bytes:
    """Return the body of a response with these images."""
    data = [ImageBody(b64_json=base64.b64encode(image).decode()) for image in images]
    return msgspec.json.encode(ImagesResponse(id=identifier, created=created, data=data))
