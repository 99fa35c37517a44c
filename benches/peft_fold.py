"""PEFT's own way to fold: python -m benches.peft_fold MODEL ADAPTER TARGET"""

from __future__ import annotations

import sys


def main(model: str, adapter: str, target: str) -> None:
    """Load both, merge, save."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    merged = peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()
    merged.save_pretrained(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
