"""Metrics of a web process: requests, picks, heartbeats.

A warm request calls three of these functions, which takes about five microseconds. The library looks up the
samples of a metric by their labels under a lock, so this module caches the samples.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from localai_cluster.metrics.kinds import REQUEST_BUCKETS, counter, gauge, seconds

HTTP_REQUESTS = counter(
    "http_requests",
    "HTTP requests that have ended; status `left`: the client left first.",
    "surface",
    "status",
)
HTTP_SECONDS = seconds(
    "http_request_duration_seconds",
    "From the head of a request to the end of its answer.",
    "surface",
    buckets=REQUEST_BUCKETS,
)
INFERENCE_REQUESTS = counter(
    "inference_requests",
    "Requests for inference that have ended; an empty model: none that is defined, or refused before that.",
    "model",
    "status",
)
INFERENCE_SECONDS = seconds(
    "inference_request_duration_seconds",
    "The same from head to end, waits for a load included; only what was answered with 200.",
    "model",
    buckets=REQUEST_BUCKETS,
)
IN_FLIGHT = gauge("inference_requests_in_flight", "Requests that run on replicas for this process.")
WAITING = gauge("inference_requests_waiting", "Requests that wait in this process for a model to be loaded.")
FIRST_TOKEN = seconds(
    "inference_first_token_seconds",
    "From a request for a stream of text to its first piece, waits for a load included.",
    "model",
    buckets=REQUEST_BUCKETS,
)
TOKENS = counter(
    "inference_tokens",
    "Tokens of prompts and answers; `cached`: those of prompts that engines say they remembered.",
    "model",
    "kind",
)
PICKS = counter(
    "picks",
    "Picks of a replica; `none`: no replica was loaded, `confirmed`: only the API key was looked at.",
    "outcome",
)
PICK_SECONDS = seconds(
    "pick_duration_seconds", "How long a request waited for the pick of its replica.", buckets=REQUEST_BUCKETS
)
PREFIX_PICKS = counter(
    "prefix_picks",
    "Picks by the prefix of a prompt: the replica that had it last (`hit`), another one because that was too"
    " busy (`kept_away`), none had enough of it (`miss`).",
    "model",
    "outcome",
)
PREFIX_BLOCKS = counter(
    "prefix_blocks",
    "Blocks of 256 bytes of those prompts, at most 64 each; `hit`: those that the picked replica had before.",
    "model",
    "kind",
)
PREFIX_ENTRIES = gauge("prefix_entries", "Blocks of prompts that this process knows a replica of.")
HEARTBEATS = counter("heartbeats", "Heartbeats of workers, by the status they were answered with.", "status")
HEARTBEATS_LOST = counter(
    "heartbeats_lost", "Heartbeats that were accepted, but could not be written to the database."
)
FIGURES = (
    HTTP_REQUESTS,
    HTTP_SECONDS,
    INFERENCE_REQUESTS,
    INFERENCE_SECONDS,
    IN_FLIGHT,
    WAITING,
    FIRST_TOKEN,
    TOKENS,
    PICKS,
    PICK_SECONDS,
    PREFIX_PICKS,
    PREFIX_BLOCKS,
    PREFIX_ENTRIES,
    HEARTBEATS,
    HEARTBEATS_LOST,
)

_reader_by_gauge: dict[Gauge, Callable[[], float]] = {}


def set_reader(figure: Gauge, read: Callable[[], float]) -> None:
    """Make a gauge read its value from `read()` at each scrape.

    A scrape of another process gets the value of the last `refresh`.
    """
    figure.set_function(read)
    _reader_by_gauge[figure] = read


def refresh() -> None:
    """Store the current values of the gauges, for scrapes of other web processes of the address."""
    for figure, read in _reader_by_gauge.items():
        figure.set(read())


CLIENT_LEFT = "left"
_SURFACE_BY_SEGMENT = {
    "v1": "inference",
    "v2": "inference",
    "embeddings": "inference",
    "models": "inference",
    "chat": "inference",
    "completions": "inference",
    "tokenize": "inference",
    "detokenize": "inference",
    "rerank": "inference",
    "audio": "inference",
    "images": "inference",
    "tts": "inference",
    "messages": "inference",
    "responses": "inference",
    "api": "api",
    "system": "api",
    "backend": "api",
    "backends": "api",
    "version": "api",
    "join": "workers",
    "admin": "admin",
    "": "pages",
    "app": "pages",
    "browse": "pages",
    "favicon.svg": "pages",
    "login": "pages",
    "static": "static",
    "healthz": "probes",
    "readyz": "probes",
    "metrics": "probes",
}
"""Surface of the server (a label of HTTP metrics) by the first segment of a path; the default is `other`."""
_OLLAMA_PATHS = frozenset(
    f"/api/{name}"
    for name in (
        *("chat", "generate", "embed", "embeddings", "show", "tags", "ps", "version"),
        *("pull", "push", "create", "copy", "delete"),
    )
)


def surface_of_path(path: str) -> str:
    """Return the surface of the server to which a path belongs, such as `inference`."""
    if path.startswith("/api/node/"):
        return "workers"
    if path in _OLLAMA_PATHS or path.startswith("/api/blobs/"):
        return "inference"
    if path.startswith("/models/"):
        return "api"
    return _SURFACE_BY_SEGMENT.get(path[1:].partition("/")[0], "other")


@cache
def _samples_of_surface(where: str, status: int | str) -> tuple[Counter, Histogram]:
    return HTTP_REQUESTS.labels(where, status), HTTP_SECONDS.labels(where)


@cache
def _samples_of_model(model: str, status: int | str) -> tuple[Counter, Histogram]:
    return INFERENCE_REQUESTS.labels(model, status), INFERENCE_SECONDS.labels(model)


_picks_of_outcome = cache(PICKS.labels)
_first_token_of_model = cache(FIRST_TOKEN.labels)
_tokens_of_model = cache(TOKENS.labels)
_prefix_picks_of_outcome = cache(PREFIX_PICKS.labels)


@cache
def _prefix_blocks_of_model(model: str) -> tuple[Counter, Counter]:
    return PREFIX_BLOCKS.labels(model, "asked"), PREFIX_BLOCKS.labels(model, "hit")


def request_ended(path: str, status: int | str, took: float) -> None:
    """Count an HTTP request that took `took` seconds."""
    requests, durations = _samples_of_surface(surface_of_path(path), status)
    requests.inc()
    durations.observe(took)


@dataclass(slots=True)
class ModelCounts:
    """Counts of this process for one model since `take_model_counts` was last called."""

    requests: int = 0
    errors: int = 0
    """Number of requests that ended with a status from 500 on."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_tokens: int = 0
    first_token_ms: int = 0
    """Sum of the milliseconds from a request to its first token."""


_model_counts: defaultdict[str, ModelCounts] = defaultdict(ModelCounts)


def take_model_counts() -> dict[str, ModelCounts]:
    """Return the counts of this process by model, and set them to 0."""
    global _model_counts
    taken, _model_counts = _model_counts, defaultdict(ModelCounts)
    return taken


def inference_ended(model: str, status: int | str, took: float) -> None:
    """Count an inference request that took `took` seconds."""
    requests, durations = _samples_of_model(model, status)
    requests.inc()
    if status == 200:
        durations.observe(took)
    is_error = isinstance(status, int) and status >= 500
    if model or is_error:  # a client that lists the models every second is no load
        counts = _model_counts[model]
        counts.requests += 1
        counts.errors += is_error


def first_token(model: str, took: float) -> None:
    """Count the seconds from a request to the first chunk of its response."""
    _first_token_of_model(model).observe(took)
    counts = _model_counts[model]
    counts.first_tokens += 1
    counts.first_token_ms += round(1000 * took)


def tokens_used(model: str, prompt: int, completion: int, cached: int) -> None:
    """Count the tokens of a response, or of its part that was generated.

    `cached` is the number of cached prompt tokens.
    """
    for kind, count in (("prompt", prompt), ("completion", completion), ("cached", cached)):
        _tokens_of_model(model, kind).inc(count)
    counts = _model_counts[model]
    counts.prompt_tokens += prompt
    counts.completion_tokens += completion


def pick_ended(outcome: str, took: float) -> None:
    """Count a pick that took `took` seconds."""
    _picks_of_outcome(outcome).inc()
    PICK_SECONDS.observe(took)


def prefix_picked(model: str, outcome: str, blocks: int, cached: int) -> None:
    """Count a pick by prefix. The picked replica cached `cached` of the prompt's `blocks`."""
    _prefix_picks_of_outcome(model, outcome).inc()
    asked, hit = _prefix_blocks_of_model(model)
    asked.inc(blocks)
    if cached:
        hit.inc(cached)
