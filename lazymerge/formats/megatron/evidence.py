"""What the files of the `torch` layout prove of their own places, whatever their folders are called.

args               the same on every rank, but for what counts the ranks
args.rank          rank mod TP is the tensor rank; among files of one tensor rank it grows with the
                   pipeline rank, then the expert rank, in each order that Megatron-LM gives ranks in.
                   Tools that convert models write all files in one process, with one number in all
chunks             the embedding is in the first one, the final norm behind the last layer, the
                   output layer in the last one. Multi-token prediction has copies of the outer two
checksums          two files of one content are not two shards
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from lazymerge.checkpoint import Note
from lazymerge.errors import InconsistentCheckpoint
from lazymerge.files.zip_directory import fingerprint
from lazymerge.formats.megatron.grid import Place, Sizes
from lazymerge.formats.megatron.names import layer_of
from lazymerge.formats.megatron.rank_file import RankFile

_OF_A_RANK = {
    *("rank", "global_rank", "local_rank", "node_rank", "group_rank", "role_rank", "process_index"),
    *("local_process_index", "local_world_size", "device", "device_id", "hostname", "start_time"),
    *("pipeline_model_parallel_rank", "tensor_model_parallel_rank", "virtual_pipeline_model_parallel_rank"),
}
"""Arguments that may differ from rank to rank."""

_OF_THE_RUN = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "world_size", "num_layers", "hidden_size"),
    *("ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "num_experts", "swiglu"),
    *("padded_vocab_size", "untie_embeddings_and_output_weights", "params_dtype", "seed", "save", "lr"),
}
"""Arguments that are the model's or the run's own, and so the same on all of its ranks."""

_OF_THE_LAYOUT = {
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size", "num_layers", "num_experts", "swiglu"),
    *("quick_geglu", "gated_linear_unit", "untie_embeddings_and_output_weights", "padded_vocab_size"),
    *("num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels", "moe_extended_tp"),
    *("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size", "apply_layernorm_1p"),
    *("use_grouped_gemm_for_shared_expert", "layernorm_zero_centered_gamma", "rotary_interleaved"),
    *("multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_pos_emb_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("experimental_attention_variant", "use_legacy_models"),
}
"""Arguments that say how elements lie in the tensors: no rank lacks one that another has.

They are read from one file, so that one which was written without them would mix up all of them.
"""

_OTHER_ENCODER = ("encoder_tensor_model_parallel_size", "encoder_pipeline_model_parallel_size")
_EMBEDDING = "embedding.word_embeddings."
_NORM = "decoder.final_layernorm."
_OUTPUT = "output_layer."
_RENAMED = "the folders were renamed, or copied over each other: take the checkpoint from where it was saved"


def check_alike(first: RankFile, file: RankFile) -> Note | None:
    """Raise `InconsistentCheckpoint` for files of different runs or steps.

    Returns a warning where only arguments differ that say neither what the model is nor which run it was.
    """
    if first.iteration != file.iteration:
        raise InconsistentCheckpoint(
            f"{file.file.path}: of iteration {file.iteration}, and {first.file.path} of {first.iteration}",
            "the files belong to different saves; collect those of one",
        )
    if file is first:
        return None
    common = first.settings.keys() & file.settings.keys() - _OF_A_RANK
    differing = [
        name
        for name in common | _OF_THE_LAYOUT
        if repr(first.settings.get(name)) != repr(file.settings.get(name))  # NaN equals nothing
    ]
    if not differing:
        return None
    strict = _OF_THE_RUN | _OF_THE_LAYOUT
    name = min(differing, key=lambda name: (name not in strict, name))
    one, other = (_said(each.settings, name) for each in (first, file))
    text = f"{file.file.path}: args say {name} = {other}, and {one} in {first.file.path}"
    if name in strict:
        raise InconsistentCheckpoint(text, "the files belong to different runs; collect those of one")
    return Note("warning", f"{text}; see whether the files are of one run")


def _said(settings: Mapping[str, Any], name: str) -> str:
    return str(settings[name])[:100] if name in settings else "nothing"


def check_ranks(files: Mapping[Place, RankFile], sizes: Sizes) -> bool:
    """Raise `InconsistentCheckpoint` for a file that another rank wrote than its folder says.

    Returns whether the files say so: False where no file, or every one with the same number, names a rank.
    """
    ranks: dict[Place, int] = {}
    for place, file in sorted(files.items()):
        if type(file.settings.get("rank")) is int:
            ranks[place] = file.settings["rank"]
    if len(set(ranks.values())) < 2:
        return False
    before: dict[int, Place] = {}
    last: dict[int, Place] = {}
    shifted = any(file.settings.get(name) for file in files.values() for name in _OTHER_ENCODER)
    for place, rank in ranks.items():
        path = files[place].file.path
        written = f"{path}: was written by rank {rank} (args.rank)"
        if rank in before:
            raise InconsistentCheckpoint(f"{written}, as was {files[before[rank]].file.path}", _RENAMED)
        before[rank] = place
        if shifted:  # the ranks of an encoder come first
            continue
        if rank % sizes.tp != place.tp:
            raise InconsistentCheckpoint(f"{written}, which is tensor rank {rank % sizes.tp}", _RENAMED)
        earlier = last.get(place.tp)
        if earlier is not None and ranks[earlier] > rank:
            raise InconsistentCheckpoint(
                f"{written}, and {files[earlier].file.path}, which comes before, by rank {ranks[earlier]}",
                _RENAMED,
            )
        last[place.tp] = place
    return True


def check_order(folder: Path, chunks: Sequence[tuple[str, Collection[str]]]) -> None:
    """Raise `InconsistentCheckpoint` where chunks cannot be in this order; each has a name, and tensors."""
    layers = [at for at, (_, names) in enumerate(chunks) if _has_layers(names, "decoder")]
    if not layers:
        return
    first, last = layers[0], layers[-1]
    embedded = [at for at, (_, names) in enumerate(chunks) if _has(names, _EMBEDDING)]
    copies = {at for at, (_, names) in enumerate(chunks) if _has_layers(names, "mtp")} | {len(chunks) - 1}
    for at in embedded:
        if at > first and (embedded[0] > first or at not in copies):
            raise _in_disorder(
                folder,
                f"{chunks[at][0]} holds {_EMBEDDING}weight, and layers are in {chunks[first][0]} before",
            )
    for where, names in chunks[:last]:
        for what in (_NORM, _OUTPUT, "mtp.layers."):
            if _has(names, what):
                raise _in_disorder(
                    folder, f"{where} holds {what}*, and layers are in {chunks[last][0]} behind"
                )


def check_distinct(
    files: Mapping[Place, RankFile], sharded: Collection[Place], experts: Collection[Place]
) -> None:
    """Raise `InconsistentCheckpoint` where one file is there under the names of two ranks.

    `sharded` hold parts that the tensor ranks divide, `experts` those that the expert ranks do; ranks
    that hold neither are honestly alike.
    """
    sizes = Counter(file.file.size for file in files.values())
    alike: dict[bytes, list[Place]] = {}
    for place, file in sorted(files.items()):
        content = fingerprint(file.file) if sizes[file.file.size] > 1 else None
        if content is None:
            continue
        for other in alike.setdefault(content, []):
            if (
                (place.tp != other.tp and place in sharded)
                or (place.ep != other.ep and place in experts)
                or (place.pp != other.pp and any(_has_layers(names, "decoder") for names in file.chunks))
            ):
                raise InconsistentCheckpoint(
                    f"{file.file.path}: holds the same bytes as {files[other].file.path}, another rank's",
                    _RENAMED,
                )
        alike[content].append(place)


def _has(names: Collection[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _has_layers(names: Collection[str], stack: str) -> bool:
    return any((layer_of(name) or ("", 0))[0] == stack for name in names)


def _in_disorder(folder: Path, what: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint(f"{folder}: its stages are not in the order of the model: {what}", _RENAMED)
