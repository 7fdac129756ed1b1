"""What an engine is asked to be: plain data, no vllm import, so that drivers can build it."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal

from eagle3_train.config import EngineConfig, StateType, TargetConfig

Purpose = Literal["capture", "serve", "plain"]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One vLLM engine, as the configuration's sections describe it.

    purpose: "capture" taps `boundaries` (sorted, last one is L) and also generates; "serve" drafts with
    the EAGLE-3 checkpoint in `drafter`; "plain" only generates. Sizes are tokens and bytes.
    arena_bytes: host memory the hidden states pass through; null fits a few engine steps and two packs.
    pack_tokens: the largest pack that is captured at once.
    chunked_prefill: null is on where it is correct (off on CPU and while serving a drafter).
    own_process: run vLLM's core in a process of its own (GPU) instead of the caller's (CPU); null chooses.
    v1_runner: insist on vLLM's older model runner, whose drafts can be recorded (0.23 serves Llama with the newer).
    """

    target: TargetConfig
    engine: EngineConfig
    purpose: Purpose
    boundaries: tuple[int, ...] = ()
    drafter: str = ""
    num_speculative_tokens: int = 0
    seed: int = 0
    capture_dtype: StateType = "bfloat16"
    arena_bytes: int | None = None
    pack_tokens: int = 0
    chunked_prefill: bool | None = None
    block_size: int | None = None
    own_process: bool | None = None
    v1_runner: bool = False

    def with_engine(self, **settings: Any) -> EngineSpec:
        """The same, but for these settings of the engine section."""
        return replace(self, engine=self.engine.model_copy(update=settings))


@dataclass(frozen=True, slots=True)
class Request:
    """One thing an engine is asked to do: answer `prompt_ids`, or (max_new_tokens=1) just read them.

    capture: hand the hidden states over; for an answer they cover prompt and answer but the last token.
    Sampling fields mean what vLLM's do; temperature 0 is greedy. ignore_eos decodes to max_new_tokens.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    capture: bool = False
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """vLLM's speculative counters over some interval: drafts, and how many of them had their token k accepted."""

    num_drafts: int
    accepted_per_position: tuple[int, ...]

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        accepted = map(operator.sub, self.accepted_per_position, earlier.accepted_per_position)
        return Acceptance(self.num_drafts - earlier.num_drafts, tuple(accepted))


@dataclass(frozen=True, slots=True)
class Drafted:
    """One list of draft tokens: the state at `position` with the embedding of `next_token` began it."""

    request_id: str
    position: int
    next_token: int
    draft_ids: tuple[int, ...]
