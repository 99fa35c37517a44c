"""What a rank does to make a Megatron checkpoint: a `GPTModel` built, filled and saved by megatron-core.

Where neither CUDA nor a compiled Transformer Engine is, some names have to be replaced first, see `prepare`.
Neither a parameter nor its name comes from a replacement.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import types
import warnings
from argparse import Namespace
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from tests.makers.megatron_core_layout import PADDED_VOCAB, megatron_weights


@dataclass(frozen=True)
class Case:
    """A checkpoint: the model, how it is cut, and what writes it."""

    model: str
    tp: int = 1
    pp: int = 1
    vpp: int | None = None  # virtual stages of each pipeline rank
    ep: int = 1
    etp: int | None = None  # tensor parallelism of experts; None: as tp
    spec: str = "local"  # or "te": the modules of Transformer Engine, whose parameters have other names
    format: str = "torch_dist"  # or "torch"

    @property
    def expert_tp(self) -> int:
        """The tensor parallelism of experts."""
        return self.tp if self.etp is None else self.etp

    @property
    def world_size(self) -> int:
        """The fewest ranks that hold it."""
        return self.pp * max(self.tp, self.ep * self.expert_tp)


def check_rank(rank: int, case: Case, hf: Path, tokens: torch.Tensor, expected: torch.Tensor) -> None:
    """Megatron's forward, in float32 on one rank, gives the logits that transformers gave for `tokens`."""
    prepare(case.spec)
    config = _read_config(hf)
    (model,) = _build(case, config, torch.float32)
    _fill(model, _read_weights(hf, config))
    length = tokens.shape[1]
    future = torch.ones(1, 1, length, length).triu(1).bool()  # Megatron would make it on "cuda"
    with torch.no_grad():
        logits = model.eval()(tokens, torch.arange(length)[None], future)
    torch.testing.assert_close(logits[..., : config.vocab_size], expected, rtol=1e-4, atol=1e-4)


def save_rank(rank: int, case: Case, hf: Path, step: Path) -> None:
    """Builds, fills and saves what this rank holds, as Megatron-LM does, into the folder `step`."""
    prepare(case.spec)
    from megatron.core.transformer.module import Float16Module

    config = _read_config(hf)
    weights = _read_weights(hf, config)
    with mock.patch("torch.cuda.is_available", return_value=case.spec == "te"):  # its modules insist
        chunks = _build(case, config, torch.bfloat16)
    models = [Float16Module(chunk.config, chunk) for chunk in chunks]
    for model in models:
        _fill(model.module, weights)
    names = ["model"] if case.vpp is None else [f"model{index}" for index in range(case.vpp)]
    state = {
        "args": _arguments(case, models[0].config, config),
        "checkpoint_version": 3.0,
        "iteration": 1,
    }
    save = _save_torch_dist if case.format == "torch_dist" else _save_torch
    save(state, dict(zip(names, models, strict=True)), case, step)


def _read_config(hf: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(hf)


def _read_weights(hf: Path, config: Any) -> dict[str, torch.Tensor]:
    """All weights as Megatron lays them out."""
    return megatron_weights(load_file(hf / "model.safetensors"), config)


# ---- what a CPU lacks ------------------------------------------------------------------------------------


def prepare(spec: str) -> None:
    """Replaces, in this process, what Megatron calls in any case and a CPU does not have: CUDA's device, the
    states of its random generators, and the compiled parts of Transformer Engine (`spec` "te"; with "local"
    Megatron is to find none).
    """
    import torch._dynamo  # refuses, if it comes later, that two functions of CUDA are one

    warnings.simplefilter("ignore")  # of fused kernels that are missed, mostly
    torch.compile = lambda function, **_: function  # called on some functions at import
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = torch.cuda.get_device_properties = lambda *_: (0, 0)
    torch.cuda.synchronize = torch.cuda.set_device = torch.cuda.empty_cache = lambda *_: None
    if spec == "te":
        _load_transformer_engine()
    else:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # importing it is an ImportError
    from megatron.core import tensor_parallel

    tensor_parallel.get_cuda_rng_tracker().fork = nullcontext
    if spec == "local":
        _complete_local_modules()


class _Compiled(types.ModuleType):
    """Has every name, and computes nothing."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


def _load_transformer_engine() -> None:
    """Imports the Python part of Transformer Engine without its compiled part."""
    package = "transformer_engine"
    common = types.ModuleType(f"{package}.common")  # its __init__ loads the shared library
    common.__path__ = [str(distribution(package).locate_file(f"{package}/common"))]
    common.load_framework_extension = lambda framework: None  # type: ignore[attr-defined]
    sys.modules[common.__name__] = common
    triton = f"{package}.pytorch.triton"
    for name in (
        f"{package}_torch",
        triton,
        *(f"{triton}.{n}" for n in ("cross_entropy", "pad", "permutation")),
    ):
        sys.modules[name] = _Compiled(name)
    sys.modules[f"{package}_torch"].get_cudnn_version = lambda: 91000  # type: ignore[attr-defined]
    import transformer_engine.common.recipe
    import transformer_engine.pytorch

    transformer_engine.common = common


def _complete_local_modules() -> None:
    """What this megatron-core calls of Transformer Engine where there is none, and its own attention for
    heads whose keys and values differ in size.
    """
    from megatron.core.models import backends
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils

    class LatentDotProductAttention(DotProductAttention):
        def __init__(
            self, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            super().__init__(*args, **kwargs)
            if v_channels is not None:
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    backends.DotProductAttention = LatentDotProductAttention
    multi_latent_attention.HAVE_TE = False
    moe_utils.te_general_gemm = None


# ---- the model -------------------------------------------------------------------------------------------


def _build(case: Case, hf: Any, dtype: torch.dtype) -> list[Any]:
    """This rank's `GPTModel`, one for each virtual pipeline stage."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    parallel_state.initialize_model_parallel(
        case.tp,
        case.pp,
        case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    config = _transformer_config(case, hf, dtype)
    stages = [None] if case.vpp is None else list(range(case.vpp))
    return [
        GPTModel(
            config,
            get_gpt_decoder_block_spec(config, case.spec == "te", "RMSNorm", vp_stage=stage),
            PADDED_VOCAB,
            hf.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=hf.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=int(hf.rope_parameters["rope_theta"]),
            vp_stage=stage,
        )
        for stage in stages
    ]


def _transformer_config(case: Case, hf: Any, dtype: torch.dtype) -> Any:
    """Megatron's configuration of the model."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type == "qwen2",
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.expert_tp,
        # asked for with experts and tensor parallelism, and known to the norms of Transformer Engine alone
        "sequence_parallel": case.spec == "te" and case.tp > 1,
    }
    experts = getattr(hf, "num_local_experts", None) or getattr(hf, "n_routed_experts", None)
    if experts:
        settings |= {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            "moe_router_topk": hf.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": case.spec == "te",
        }
    if hf.model_type != "deepseek_v3":
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        grouped = {"num_query_groups": hf.num_key_value_heads, "kv_channels": head_dim}
        return TransformerConfig(**settings, **grouped)
    settings |= {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",
        "moe_layer_freq": [int(number >= hf.first_k_dense_replace) for number in range(hf.num_hidden_layers)],
        "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": hf.n_group,
        "moe_router_group_topk": hf.topk_group,
        "moe_router_dtype": "fp32",
    }
    return MLATransformerConfig(**settings)


def _fill(model: Any, weights: dict[str, torch.Tensor]) -> None:
    """Gives every parameter, and the bias of the experts' choice, its part of the whole weight."""
    from megatron.core import parallel_state as state

    dense_place = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()
    expert_place = state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()
    biases = [(name, tensor) for name, tensor in model.named_buffers() if name.endswith("expert_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        weight = weights[_global_name(name, model)]
        if ".experts." in name:
            weight = _part(name, parameter, weight, *expert_place)
        elif getattr(model.get_submodule(name.rpartition(".")[0]), "parallel_mode", "") is not None:
            weight = _part(name, parameter, weight, *dense_place)  # else: every rank has all of it
        assert weight.shape == parameter.shape, (name, weight.shape, parameter.shape)
        kept = weight.dtype == torch.float32  # the bias of the experts' choice is so in every model
        parameter.data = weight.to(torch.float32 if kept else parameter.dtype, copy=True)


def _part(name: str, parameter: Any, weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """A rank's part of a weight, where Megatron says that the parameter is cut."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return weight
    halves = (
        weight.chunk(2) if ".linear_fc1." in name else [weight]
    )  # a part of the gate, and one of the rest
    dim = 1 if ".linear_fc2." in name else parameter.partition_dim  # mcore cuts Transformer Engine's experts
    return torch.cat([half.chunk(size, dim)[rank] for half in halves])


def _global_name(name: str, model: Any) -> str:
    """A parameter's name with the numbers that its layer and its expert have in the whole model."""
    from megatron.core import parallel_state

    if found := re.fullmatch(r"(decoder\.layers\.)(\d+)(\..*)", name):
        number = model.decoder.layers[int(found[2])].layer_number - 1
        name = f"{found[1]}{number}{found[3]}"
    name = re.sub(r"experts\.(linear_fc.\.weight)(\d+)$", r"experts.local_experts.\2.\1", name)  # grouped
    if found := re.fullmatch(r"(.*\.local_experts\.)(\d+)(\..*)", name):
        local = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        first = parallel_state.get_expert_model_parallel_rank() * local
        name = f"{found[1]}{first + int(found[2])}{found[3]}"
    return name


# ---- saving ----------------------------------------------------------------------------------------------


def _save_torch_dist(state: dict[str, Any], models: dict[str, Any], case: Case, step: Path) -> None:
    """As Megatron-LM by default: data-parallel ranks share the writing of a shard."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group}
    state |= {name: model.sharded_state_dict(metadata=metadata) for name, model in models.items()}
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group)
    dist_checkpointing.save(state, str(step), strategy)
    for helper in multiprocessing.active_children():  # of the writer; a rank that leaves would not end it
        helper.terminate()
        helper.join()


def _save_torch(state: dict[str, Any], models: dict[str, Any], case: Case, step: Path) -> None:
    """As Megatron-LM's `--ckpt-format torch`: a file of each model-parallel rank."""
    from megatron.core import parallel_state

    state |= {name: model.state_dict_for_save_checkpoint() for name, model in models.items()}
    folder = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if case.pp > 1:
        folder += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if case.ep > 1:
        folder += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    if parallel_state.get_expert_data_parallel_rank() == 0:
        (step / folder).mkdir()
        torch.save(state, step / folder / "model_optim_rng.pt")


FIELDS = """
num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
normalization add_bias_linear add_qkv_bias qk_layernorm multi_latent_attention q_lora_rank
kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim moe_ffn_hidden_size moe_layer_freq
moe_shared_expert_intermediate_size moe_grouped_gemm mtp_num_layers tensor_model_parallel_size
pipeline_model_parallel_size virtual_pipeline_model_parallel_size expert_model_parallel_size
expert_tensor_parallel_size context_parallel_size sequence_parallel params_dtype bf16
attention_backend layernorm_epsilon
"""


def _arguments(case: Case, config: Any, hf: Any) -> Namespace:
    """The part of Megatron-LM's command line that says what the model is and how it is cut. Megatron-LM's
    own has some 600 fields.
    """
    from megatron.core.enums import ModelType

    latent = config.multi_latent_attention
    arguments = {name: getattr(config, name, None) for name in FIELDS.split()}
    arguments |= {
        "num_experts": config.num_moe_experts,
        "swiglu": config.gated_linear_unit,
        "group_query_attention": not latent,
        "num_query_groups": 1 if latent else config.num_query_groups,  # where there are no groups it says 1
        "untie_embeddings_and_output_weights": not hf.tie_word_embeddings,
        "padded_vocab_size": PADDED_VOCAB,
        "make_vocab_size_divisible_by": PADDED_VOCAB // case.tp,
        "vocab_size": None,
        "transformer_impl": "local" if case.spec == "local" else "transformer_engine",
        "ckpt_format": case.format,
        "model_type": ModelType.encoder_or_decoder,
    }
    return Namespace(**arguments)
