"""Published models and their dimensions, from their `config.json`: the rows of `docs/fit.md`.

`HELD_OUT` was not measured before the constants of the formula had been chosen by `MODELS`.
"""

from collections.abc import Sequence
from dataclasses import replace

from gguf import GGMLQuantizationType as Type

from tests.support.gguf_files import Dimensions

_MLA = {
    "attention.kv_lora_rank": 512,
    "rope.dimension_count": 64,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,
}
_GEMMA = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _at(layers: int, heads: int, *with_attention: int) -> tuple[int, ...]:
    """Return the number of heads of each layer of a hybrid model; 0 for layers without attention."""
    return tuple(heads if index in with_attention else 0 for index in range(layers))


def _ssm(inner: int, state: int, rank: int, groups: int = 0) -> dict[str, int]:
    sizes = {
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": rank,
        "ssm.conv_kernel": 4,
    }
    return sizes | ({"ssm.group_count": groups} if groups else {})


def _gemma3(model: Dimensions, window: int = 1024) -> Dimensions:
    return replace(model, tied=True, post_norms=True, qk_norm=True, window=window)


MODELS: Sequence[Dimensions] = (
    Dimensions("SmolLM2-135M", "llama", 30, 576, 1536, 9, 3, 49152, tied=True),
    Dimensions("Llama-3.2-1B", "llama", 16, 2048, 8192, 32, 8, 128256, tied=True),
    Dimensions("Llama-3.1-8B", "llama", 32, 4096, 14336, 32, 8, 128256),
    Dimensions("Llama-3.1-70B", "llama", 80, 8192, 28672, 64, 8, 128256, kind=Type.IQ1_S),
    Dimensions("Mistral-7B-v0.3", "llama", 32, 4096, 14336, 32, 8, 32768, kind=Type.Q4_0),
    Dimensions("Llama-2-13B", "llama", 40, 5120, 13824, 40, 40, 32000, kind=Type.Q8_0),
    Dimensions("Mixtral-8x7B", "llama", 32, 4096, 14336, 32, 8, 32000, experts=8, used=2, kind=Type.IQ1_S),
    Dimensions("Qwen2.5-0.5B", "qwen2", 24, 896, 4864, 14, 2, 151936, tied=True, bias=True),
    Dimensions("Qwen2.5-7B", "qwen2", 28, 3584, 18944, 28, 4, 152064, bias=True),
    Dimensions("Qwen2.5-32B", "qwen2", 64, 5120, 27648, 40, 8, 152064, bias=True),
    Dimensions("Qwen3-0.6B", "qwen3", 28, 1024, 3072, 16, 8, 151936, 128, tied=True, qk_norm=True),
    Dimensions("Qwen3-8B", "qwen3", 36, 4096, 12288, 32, 8, 151936, 128, qk_norm=True),
    Dimensions("Qwen3-32B", "qwen3", 64, 5120, 25600, 64, 8, 151936, 128, qk_norm=True),
    Dimensions("Qwen3-30B-A3B", "qwen3moe", 48, 2048, 6144, 32, 4, 151936, 128, 128, 8, 768, qk_norm=True),
    Dimensions(
        "Qwen3-235B-A22B", "qwen3moe", 94, 4096, 12288, 64, 4, 151936, 128, 128, 8, 1536, qk_norm=True
    ),
    Dimensions(
        *("gemma-2-2b", "gemma2", 26, 2304, 9216, 8, 4, 256000, 256),
        tied=True,
        post_norms=True,
        window=4096,
        figures=_GEMMA,
    ),
    Dimensions(
        *("gemma-2-9b", "gemma2", 42, 3584, 14336, 16, 8, 256000, 256),
        tied=True,
        post_norms=True,
        window=4096,
        figures=_GEMMA,
    ),
    _gemma3(Dimensions("gemma-3-1b", "gemma3", 26, 1152, 6912, 4, 1, 262144, 256), 512),
    _gemma3(Dimensions("gemma-3-12b", "gemma3", 48, 3840, 15360, 16, 8, 262208, 256)),
    _gemma3(Dimensions("gemma-3-27b", "gemma3", 62, 5376, 21504, 32, 16, 262208, 128)),
    Dimensions("Phi-3.5-mini", "phi3", 32, 3072, 8192, 32, 32, 32064, fused=True),
    Dimensions("Phi-4", "phi3", 40, 5120, 17920, 40, 10, 100352, fused=True),
    Dimensions(
        *("gpt-oss-20b", "gpt-oss", 24, 2880, 2880, 64, 8, 201088, 64, 32, 4, 2880),
        bias=True,
        post_norms=True,
        window=128,
        kind=Type.MXFP4,
    ),
    Dimensions(
        *("gpt-oss-120b", "gpt-oss", 36, 2880, 2880, 64, 8, 201088, 64, 128, 4, 2880),
        bias=True,
        post_norms=True,
        window=128,
        kind=Type.MXFP4,
    ),
    Dimensions(
        *("DeepSeek-V2-Lite", "deepseek2", 27, 2048, 10944, 16, 1, 102400, 0, 64, 6, 1408, 1, 2816),
        figures={**_MLA, "expert_shared_count": 2},
    ),
    Dimensions(
        *("DeepSeek-V3", "deepseek2", 61, 7168, 18432, 128, 1, 129280, 0, 256, 8, 2048, 3, 2048),
        figures={**_MLA, "attention.q_lora_rank": 1536, "expert_shared_count": 1},
        kind=Type.Q2_K,
    ),
    Dimensions("mamba-130m", "mamba", 24, 768, 0, 0, 0, 50280, tied=True, figures=_ssm(1536, 16, 48)),
    Dimensions("Mamba-Codestral-7B", "mamba2", 64, 4096, 0, 0, 0, 32768, figures=_ssm(8192, 128, 128, 8)),
    Dimensions(
        *("granite-4.0-h-micro", "granitehybrid", 40, 2048, 8192, 32, _at(40, 8, 5, 15, 25, 35), 100352),
        tied=True,
        figures=_ssm(4096, 128, 64, 1),
    ),
    Dimensions(
        *("LFM2-1.2B", "lfm2", 16, 2048, 8192, 32, _at(16, 8, 2, 5, 8, 10, 12, 14), 65536),
        tied=True,
        qk_norm=True,
        figures={"shortconv.l_cache": 3},
    ),
    Dimensions("bge-small-en", "bert", 12, 384, 1536, 12, 12, 30522, figures={"context_length": 512}),
    Dimensions("bge-large-en", "bert", 24, 1024, 4096, 16, 16, 30522, figures={"context_length": 512}),
    Dimensions(
        "starcoder2-3b", "starcoder2", 30, 3072, 12288, 24, 2, 49152, tied=True, gated=False, bias=True
    ),
    Dimensions("falcon-7b", "falcon", 32, 4544, 18176, 71, 1, 65024, gated=False, fused=True),
    Dimensions(
        "command-r7b",
        "cohere2",
        32,
        4096,
        14336,
        32,
        8,
        256000,
        tied=True,
        window=4096,
        figures={"logit_scale": 0.25},
    ),
    Dimensions("OLMoE-1B-7B", "olmoe", 16, 2048, 1024, 16, 16, 50304, 0, 64, 8, qk_norm=True),
)

HELD_OUT: Sequence[Dimensions] = (
    Dimensions("Llama-3.2-3B", "llama", 28, 3072, 8192, 24, 8, 128256, 128, tied=True),
    Dimensions("Mistral-Nemo-12B", "llama", 40, 5120, 14336, 32, 8, 131072, 128),
    Dimensions("Qwen2.5-14B", "qwen2", 48, 5120, 13824, 40, 8, 152064, bias=True),
    Dimensions("Qwen3-4B", "qwen3", 36, 2560, 9728, 32, 8, 151936, 128, tied=True, qk_norm=True),
    Dimensions(
        *("gemma-2-27b", "gemma2", 46, 4608, 36864, 32, 16, 256000, 128),
        tied=True,
        post_norms=True,
        window=4096,
        figures=_GEMMA,
    ),
    _gemma3(Dimensions("gemma-3-4b", "gemma3", 34, 2560, 10240, 8, 4, 262208, 256)),
    Dimensions("Phi-3-medium", "phi3", 40, 5120, 17920, 40, 10, 32064, fused=True),
    Dimensions("SmolLM3-3B", "smollm3", 36, 2048, 11008, 16, 4, 128256, tied=True),
    Dimensions(
        *("granite-3.1-2b", "granite", 40, 2048, 8192, 32, 8, 49155),
        tied=True,
        figures={
            "logit_scale": 8.0,
            "embedding_scale": 12.0,
            "residual_scale": 0.22,
            "attention.scale": 0.0156,
        },
    ),
    Dimensions(
        *("LFM2-350M", "lfm2", 16, 1024, 4608, 16, _at(16, 8, 2, 5, 8, 10, 12, 14), 65536),
        tied=True,
        qk_norm=True,
        figures={"shortconv.l_cache": 3},
    ),
    Dimensions("mamba-1.4b", "mamba", 48, 2048, 0, 0, 0, 50280, tied=True, figures=_ssm(4096, 16, 128)),
    Dimensions("bge-base-en", "bert", 12, 768, 3072, 12, 12, 30522, figures={"context_length": 512}),
    Dimensions(
        *("starcoder2-7b", "starcoder2", 32, 4608, 18432, 36, 4, 49152), tied=True, gated=False, bias=True
    ),
)
