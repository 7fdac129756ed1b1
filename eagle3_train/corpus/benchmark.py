"""Prompts of one evaluation file; preflight and evaluation read them alike."""

from __future__ import annotations

from eagle3_train.config import JobConfig
from eagle3_train.corpus.load import load_prompts
from eagle3_train.corpus.render import Renderer
from eagle3_train.records import Prompt

HELD_OUT = "held_out"
"""The entry of evaluate.sources that is no file."""


def answer_room(config: JobConfig) -> int:
    """Longest prompt, in tokens, that leaves the engine room for an answer of full length."""
    return config.engine.max_model_len - config.evaluate.sampling.max_new_tokens


def benchmark_prompts(config: JobConfig, source: str, renderer: Renderer) -> list[Prompt]:
    """All prompts of the file that leave room for an answer, in its order. Raises CorpusError when there is none."""
    read = {
        "sources": (source,),
        "limit": None,
        "max_len": answer_room(config) + 1,
        "min_yield": 0.0,  # what does not fit is counted, and no reason to stop
    }
    return load_prompts(config.corpus.model_copy(update=read), renderer)[0]
