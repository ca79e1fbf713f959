"""R2.74: a call of an engine that is somebody's request cannot be made without being counted."""

import ast
import asyncio
from pathlib import Path

import pytest

from localai_cluster.rpc.client import TRACKED_METHODS, UNTRACKED_METHODS, BackendClient, ClientPool
from localai_cluster.rpc.generated import backend_pb2
from localai_cluster.rpc.messages import PredictOptions

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.rule("R2.74", *(f"T-INF-{number}" for number in range(5, 18)))
def test_every_call_that_we_know_is_decided() -> None:
    """Those that no engine of ours has, too: who adds one finds it among the tracked ones."""
    methods = {one.name for one in backend_pb2.DESCRIPTOR.services_by_name["Backend"].methods}
    assert methods <= TRACKED_METHODS | UNTRACKED_METHODS
    assert not TRACKED_METHODS & UNTRACKED_METHODS
    later = {"VAD", "Diarize", "VoiceVerify", "VoiceAnalyze", "VoiceEmbed", "FaceVerify", "FaceAnalyze"}
    later |= {"TokenClassify", "Score", "AudioEncode", "AudioDecode", "AudioTransform", "SoundDetection"}
    assert later <= TRACKED_METHODS


@pytest.mark.rule("R2.74", "R2.71", "T-INF-3", "T-INF-4")
def test_a_client_of_its_own_has_no_call_that_is_a_request_and_the_pools_has() -> None:
    async def scenario() -> None:
        own, pool = BackendClient("127.0.0.1:1"), ClientPool()
        with pytest.raises(AttributeError):
            await own.embedding(PredictOptions(), 1.0)
        known = {one.name for one in backend_pb2.DESCRIPTOR.services_by_name["Backend"].methods}
        assert vars(own._stub).keys() == known & UNTRACKED_METHODS
        assert vars(pool.get("127.0.0.1:1")._stub).keys() == known
        await own.close()
        await pool.close()

    asyncio.run(scenario())


@pytest.mark.rule("R2.74")
def test_only_the_gateway_makes_a_pool_and_nothing_else_says_counted() -> None:
    """What it hands out is counted in before and out after, whatever happens (`Gateway.run`)."""
    makes: set[str] = set()
    for path in [*ROOT.glob("nodes/**/*.py"), *ROOT.glob("localai_cluster/**/*.py")]:
        for call in (one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)):
            named = call.func.id if isinstance(call.func, ast.Name) else ""
            counted = named == "BackendClient" and any(key.arg == "counted" for key in call.keywords)
            if named == "ClientPool" or counted:
                makes.add(path.relative_to(ROOT).as_posix())
    assert makes == {"nodes/gateway/gateway.py", "localai_cluster/rpc/client.py"}
