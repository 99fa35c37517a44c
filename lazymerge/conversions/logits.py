"""The logits of two model folders, as transformers loads them. Runs as a process (lazymerge.forward).

    stdin    {"folders": [one, other], "trust_remote_code": ..., "tokens": ..., "seconds": ..., "memory": ...}
    stdout   what `lazymerge.forward.ForwardReport` is made of, or {"refused": complaint, "folder": which}

One model is in memory at a time, in fp32 on the CPU. The prompt is token ids that depend on nothing but the
size of the vocabulary. Processor time (seconds) and memory (bytes) are bounded after the imports: a config
may ask for a model that is larger than its weights. A model that lacks weights is not run: transformers
draws them at random.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

from lazymerge.conversions.limits import bound


class Refused(Exception):
    """transformers does not load or run the folder; the text is why."""


def logits(folder: str, trust: bool, tokens: int) -> tuple[Any, dict[str, Any]]:
    """The logits (fp32) on the prompt, None where weights are missing; and the class and what loading it
    complained of.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust, local_files_only=True
        )
        model_class = _class_of(config, trust)
        model, info = model_class.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation="eager",
            trust_remote_code=trust,
        )
        said = {
            "class_name": type(model).__name__,
            "missing": sorted(info["missing_keys"]),
            "unexpected": sorted(info["unexpected_keys"]),
        }
        if said["missing"]:
            return None, said
        model.eval()
        size = config.get_text_config().vocab_size
        prompt = torch.tensor([[(at * 7919 + 11) % size for at in range(tokens)]])
        inputs = {"input_ids": prompt}
        if config.is_encoder_decoder:
            inputs["decoder_input_ids"] = prompt
        with torch.no_grad():
            result = model(**inputs)
    except Refused:
        raise
    except Exception as error:  # whatever the model's class, or its code, does
        if isinstance(error, MemoryError) or "bad_alloc" in str(error) or "allocate memory" in str(error):
            raise Refused("config.json asks for more memory than twice its weights and 2 GiB") from error
        raise Refused(f"{type(error).__name__}: {[*str(error).strip().splitlines(), ''][0]}"[:500]) from error
    found = getattr(result, "logits", None)
    if found is None:
        found = result[0]
    return found.float().clone(), said


def _class_of(config: Any, trust: bool) -> Any:
    """The class that config.json names first: a model's of transformers, or, if it is trusted, its own."""
    import transformers

    names = config.architectures or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Refused("architectures is no list of names")
    references = getattr(config, "auto_map", None) or {}
    for key, reference in references.items() if trust else ():
        if names and str(reference).endswith(f".{names[0]}") and str(key).startswith("AutoModel"):
            return getattr(transformers, key)
    known = getattr(transformers, names[0], None) if names else None
    if not (isinstance(known, type) and issubclass(known, transformers.PreTrainedModel)):
        raise Refused(
            f"transformers has no model {names[0]!r:.100}" if names else "config.json names no architecture"
        )
    return known


def compared(request: dict[str, Any]) -> dict[str, Any]:
    """Load and run both, and compare what they say."""
    import torch

    torch.set_grad_enabled(False)
    found, said = [], []
    for which, folder in enumerate(request["folders"]):
        try:
            values, about = logits(folder, request["trust_remote_code"], request["tokens"])
        except Refused as error:
            return {"refused": str(error), "folder": which}
        found.append(values)
        said.append(about)
        gc.collect()
    one, other = found
    answer = {
        "class_names": [about["class_name"] for about in said],
        "missing": [about["missing"] for about in said],
        "unexpected": [about["unexpected"] for about in said],
        "shapes": [[] if values is None else list(values.shape) for values in found],
    }
    if one is None or other is None or one.shape != other.shape:
        return {**answer, "largest": None, "magnitude": None, "agreeing": 0}
    difference = (one.double() - other.double()).abs()
    alike = one.argmax(-1) == other.argmax(-1)
    finite = bool(torch.isfinite(one).all() and torch.isfinite(other).all())
    return {
        **answer,
        "largest": float(difference.max()) if finite else None,
        "magnitude": float(other.abs().max()) if finite else None,
        "agreeing": int(alike.sum()),
    }


def main() -> None:
    """Answer the request on stdin; nothing but the answer reaches stdout."""
    request = json.load(sys.stdin)
    answer, sys.stdout = sys.stdout, sys.stderr
    import torch  # noqa: F401
    import transformers  # noqa: F401

    bound(request["seconds"], request["memory"])
    json.dump(compared(request), answer)


if __name__ == "__main__":
    main()
