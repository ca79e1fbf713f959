"""What a pasted text means."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localai_cluster.kit.errors import InvalidInput
from localai_cluster.registries import references as images
from nodes.sources.references import (
    DefinitionRef,
    GalleryRef,
    HubRef,
    ImageRef,
    NameRef,
    ObjectRef,
    Reference,
    SharedRef,
    WebRef,
    recognise,
)

MIRROR = "https://mirror.example/hf"
REPO = "Qwen/Qwen2.5-0.5B-Instruct-GGUF"


def image(path: str, tag: str, host: str = "registry.ollama.ai", *, is_ollama: bool = True) -> ImageRef:
    return ImageRef(images.ImageReference(host, path, tag), is_ollama)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (REPO, HubRef(REPO)),
        (f"  {REPO}  ", HubRef(REPO)),
        (f"`{REPO}`", HubRef(REPO)),
        (f"{REPO}:Q4_K_M", HubRef(REPO, quantization="Q4_K_M")),
        (f"{REPO}@v1.0", HubRef(REPO, "v1.0")),
        (f"{REPO}/a/b.gguf", HubRef(REPO, path="a/b.gguf")),
        (f"hf.co/{REPO}:Q4_K_M", HubRef(REPO, quantization="Q4_K_M")),
        (f"huggingface.co/{REPO}", HubRef(REPO)),
        (f"https://huggingface.co/{REPO}", HubRef(REPO)),
        (f"https://huggingface.co/models/{REPO}", HubRef(REPO)),
        (f"https://huggingface.co/{REPO}/tree/main", HubRef(REPO, "main")),
        (f"https://huggingface.co/{REPO}/tree/main/sub", HubRef(REPO, "main")),
        (f"https://huggingface.co/{REPO}/blob/main/x-q4_k_m.gguf", HubRef(REPO, "main", "x-q4_k_m.gguf")),
        (
            f"https://huggingface.co/{REPO}/resolve/abc123/d/x.gguf?download=true",
            HubRef(REPO, "abc123", "d/x.gguf"),
        ),
        (f"https://huggingface.co/{REPO}/resolve/main/a%20b.gguf", HubRef(REPO, "main", "a b.gguf")),
        (f"{MIRROR}/{REPO}/resolve/main/x.gguf", HubRef(REPO, "main", "x.gguf")),
        (f"huggingface://{REPO}/x.gguf", HubRef(REPO, path="x.gguf")),
        (f"hf://{REPO}@main/x.gguf", HubRef(REPO, "main", "x.gguf")),
        (f"huggingface-cli download {REPO} x.gguf --local-dir .", HubRef(REPO, path="x.gguf")),
        (f"hf download {REPO}", HubRef(REPO)),
        (f"llama-server -hf {REPO}:Q8_0 --port 8000", HubRef(REPO, quantization="Q8_0")),
        (f"vllm serve {REPO} --max-model-len 8192", HubRef(REPO)),
        (f"ollama run hf.co/{REPO}:Q4_K_M", HubRef(REPO, quantization="Q4_K_M")),
        ("ollama run llama3.2:3b", image("library/llama3.2", "3b")),
        ("$ ollama pull llama3.2", image("library/llama3.2", "latest")),
        ('ollama run llama3.2 "why is the sky blue?"', image("library/llama3.2", "latest")),
        ("ollama://someone/model:7b-q4", image("someone/model", "7b-q4")),
        ("https://ollama.com/library/llama3.2:3b", image("library/llama3.2", "3b")),
        ("oci://ghcr.io/group/model:tag", image("group/model", "tag", "ghcr.io", is_ollama=False)),
        ("https://example.com/files/x.gguf", WebRef("https://example.com/files/x.gguf")),
        ("https://example.com/x.gguf#part", WebRef("https://example.com/x.gguf")),
        ("s3://bucket/folder/x.gguf", ObjectRef("bucket", "folder/x.gguf")),
        ("/srv/share/models/x", SharedRef("/srv/share/models/x")),
        ("file:///srv/share/x%20y", SharedRef("/srv/share/x y")),
        ("localai@qwen2.5-0.5b-instruct", GalleryRef("localai", "qwen2.5-0.5b-instruct")),
        ("qwen2.5 instruct", NameRef("qwen2.5 instruct")),
        ("llama3.2:3b", NameRef("llama3.2:3b")),
        (text := "name: m\nbackend: llama-cpp\nparameters: {model: m.gguf}", DefinitionRef(text)),
        ("name: m", DefinitionRef("name: m")),
    ],
)
def test_what_people_copy_is_recognised(text: str, meant: Reference) -> None:
    assert recognise(text, mirror=MIRROR) == meant


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is required"),
        (" \n ", "is required"),
        ("a" * 3000, "more than"),
        ("a" * 201, "more than 200"),
        ("one\ntwo", "several lines"),
        ("a\u202eb/c", "U+202E"),
        ("own\u200ber/name", "U+200B"),
        ("owner/..", "not a repository"),
        ("../name", "not a repository"),
        ("owner/name/../x.gguf", "leads out"),
        ("hf://owner/name/a//b", "leads out"),
        ("https://huggingface.co/owner/name/resolve/main/..%2f..%2fx.gguf", "leads out"),
        ("https://huggingface.co/owner/name/resolve/ma in/x.gguf", "revision"),
        ("https://huggingface.co/datasets/owner/name", "a data set"),
        ("https://huggingface.co/spaces/owner/name", "a Space"),
        ("https://user:secret@example.com/x.gguf", "user name or password"),
        ("https:///x.gguf", "without a host"),
        ("https://[::1/x.gguf", "malformed"),
        (f"{MIRROR}///[", "not a repository"),
        ("ftp://example.com/x.gguf", "scheme"),
        ("javascript://x", "scheme"),
        ("s3://b/x", "not an object"),
        ("s3://bucket/../x", "not an object"),
        ("oci://UPPER CASE", "not an image"),
        ("ollama run ../x", "not a model"),
    ],
)
def test_what_is_none_of_them_is_refused_with_its_reason(text: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        recognise(text, mirror=MIRROR)
    assert problem in refused.value.message
    assert refused.value.field == "text"


@given(st.text(max_size=300))
def test_any_text_has_a_meaning_or_a_reason(text: str) -> None:
    """Nothing else is raised, and no path that is recognised leads anywhere else."""
    try:
        meant = recognise(text, mirror=MIRROR)
    except InvalidInput:
        return
    if isinstance(meant, HubRef):
        assert meant.repo.count("/") == 1
        assert ".." not in meant.repo
        assert {"", ".", ".."}.isdisjoint(meant.path.split("/")) or not meant.path


@given(
    st.lists(
        st.sampled_from(
            ["hf.co", "https:", "", "owner", "..", "%2e%2e", "resolve", "main", "x.gguf", "@", ":"]
        )
    ).map("/".join)
)
def test_addresses_made_of_their_parts_never_lead_out(text: str) -> None:
    try:
        meant = recognise(text)
    except InvalidInput:
        return
    path = getattr(meant, "path", "")
    assert isinstance(meant, SharedRef) or {".", ".."}.isdisjoint(path.split("/"))
