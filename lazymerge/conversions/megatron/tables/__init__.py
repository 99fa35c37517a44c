"""The tables of the families that lazymerge knows: one module for each kin."""

from __future__ import annotations

from lazymerge.conversions.megatron.family import Family
from lazymerge.conversions.megatron.tables.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE_LITE
from lazymerge.conversions.megatron.tables.gemma import GEMMA2, GEMMA3, GEMMA3_TEXT
from lazymerge.conversions.megatron.tables.glm import GLM4, GLM4_MOE
from lazymerge.conversions.megatron.tables.gpt_oss import GPT_OSS
from lazymerge.conversions.megatron.tables.llama import LLAMA, MISTRAL, MIXTRAL, PHI3
from lazymerge.conversions.megatron.tables.llama4 import LLAMA4, LLAMA4_TEXT
from lazymerge.conversions.megatron.tables.qwen import MIMO, QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from lazymerge.conversions.megatron.tables.qwen3_next import QWEN3_NEXT
from lazymerge.conversions.megatron.tables.qwen_vl import QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    PHI3,
    LLAMA4_TEXT,
    LLAMA4,
    QWEN2,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    MIMO,
    QWEN3_NEXT,
    QWEN2_5_VL,
    QWEN3_VL,
    QWEN3_VL_MOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GEMMA2,
    GEMMA3_TEXT,
    GEMMA3,
    GPT_OSS,
)
