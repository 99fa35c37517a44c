"""Train a small model with FSDP2 on four ranks, merge its checkpoint, and compare the two models.

    four processes (gloo, CPU)          lazymerge merge            transformers
    one optimizer step under FSDP2  ->  in a process of its own ->  from_pretrained(OUT)
    model_world_size_4_rank_R.pt        no torch.distributed        same prompt, same logits?

The checkpoint is laid out as verl lays it out. The vocabulary does not divide by four, so shards
are uneven, and the embeddings are tied, as in most small models. Ends with exit code 0 only if
every logit of the merged model is, bit for bit, that of the model while it was still sharded.

Run it with `make demo`, or `python -m examples.demo [FOLDER]` to keep what it makes in FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Nothing here needs a network, and one thread in every process means one order of summation.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config
from transformers.utils import logging

RANKS = 4
PROMPT = "A checkpoint is one state dict whose tensors have not been read yet."


def config() -> Qwen2Config:
    """A Qwen2 of some 35 million parameters: 70 MB in bfloat16."""
    return Qwen2Config(
        vocab_size=16_001,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=9,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["Qwen2ForCausalLM"],
    )


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that maps bytes to numbers: enough to see that it comes along."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def train_and_save(rank: int, folder: Path) -> None:
    """One rank: shard the model, take one step, save this rank's part; rank 0 saves the logits too."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)

    tokens = AutoTokenizer.from_pretrained(folder / "huggingface")(PROMPT, return_tensors="pt").input_ids
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()

    name = f"world_size_{RANKS}_rank_{rank}.pt"
    torch.save(model.state_dict(), folder / f"model_{name}")
    torch.save(optimizer.state_dict(), folder / f"optim_{name}")  # is there, and is never opened
    torch.save({"rng": torch.get_rng_state()}, folder / f"extra_state_{name}")
    if rank == 0:
        model.generation_config.save_pretrained(folder / "huggingface")
        (folder / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}))

    with torch.no_grad():
        logits = model.eval()(tokens).logits
    if rank == 0:
        torch.save(logits, folder.parent / "logits.pt")
    dist.barrier()
    dist.destroy_process_group()


def build(folder: Path) -> None:
    """A checkpoint as verl leaves it behind, in `folder`."""
    (folder / "huggingface").mkdir(parents=True)
    config().save_pretrained(folder / "huggingface")
    write_tokenizer(folder / "huggingface")
    mp.spawn(train_and_save, args=(folder,), nprocs=RANKS)
    (folder / "store").unlink(missing_ok=True)


def differing(folder: Path, expected: torch.Tensor) -> int:
    """How many logits of the model in `folder` are not, bit for bit, the `expected` ones."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if loading["missing_keys"] or loading["unexpected_keys"]:
        sys.exit(f"FAILED: the merged model does not load cleanly: {loading}")
    tokens = AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    if (logits.shape, logits.dtype) != (expected.shape, expected.dtype):
        sys.exit(
            f"FAILED: {logits.dtype} {tuple(logits.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        )
    # As integers: floats would call -0.0 and 0.0 equal, and NaN different from itself.
    return int((logits.view(torch.int16) != expected.view(torch.int16)).sum())


def show(folder: Path) -> None:
    """Print the files of a folder with their sizes."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(f"    {path.stat().st_size:>12,}  {path.relative_to(folder)}")


def run(folder: Path) -> None:
    """The demo, in an empty or new `folder`."""
    source, merged = folder / "global_step_1" / "actor", folder / "merged"
    print(f"1. One step of FSDP2 on {RANKS} ranks (gloo), saved as verl saves it:", flush=True)
    build(source)
    show(source)

    command = [sys.executable, "-m", "lazymerge", "merge", str(source), str(merged)]
    print(f"\n2. $ lazymerge {' '.join(command[3:])}", flush=True)
    start = time.perf_counter()
    status = subprocess.run(command).returncode
    if status:
        sys.exit(f"FAILED: lazymerge ended with exit code {status}")
    print(f"   took {time.perf_counter() - start:.2f} s and left:")
    show(merged)

    print("\n3. AutoModelForCausalLM.from_pretrained on the result, and the same prompt:", flush=True)
    expected = torch.load(source.parent / "logits.pt")
    wrong = differing(merged, expected)
    if wrong:
        sys.exit(f"FAILED: {wrong:,} of {expected.numel():,} logits differ from those of the sharded model")
    print(f"   all {expected.numel():,} logits are bit for bit those of the model that was saved")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
        run(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory(prefix="lazymerge-demo-") as folder:
            run(Path(folder))
