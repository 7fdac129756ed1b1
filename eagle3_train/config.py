"""Every knob of a job: frozen, documented, validated; light to import (no torch, ray, vllm).

The docstring under a field is its help text; `docs/config.md` is generated from it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

StateType = Literal["bfloat16", "float32", "float8_e4m3fn"]


Share = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change after load."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _absolute(path: str) -> str:
    """A directory that exists as an absolute path: Ray's workers run in directories of their own. Hub ids stay."""
    return str(Path(path).resolve()) if Path(path).exists() else path


class TargetConfig(Section):
    """The frozen model being accelerated."""

    path: Annotated[str, AfterValidator(_absolute)]
    """Directory of the target: config.json, tokenizer, safetensors weights."""
    tokenizer: Annotated[str, AfterValidator(_absolute)] | None = None
    """Directory of the tokenizer, when it is not the target's own."""
    trust_remote_code: bool = False
    """Consent to execute Python files that ship inside the target's directory."""
    tap_by_hooks: str | None = None
    """vLLM class without EAGLE-3 taps (e.g. Glm4MoeForCausalLM) that forward hooks may tap; needs engine.enforce_eager."""


class DrafterConfig(Section):
    """Architecture of the drafter; sizes not named here are derived from the target."""

    attention: Literal["llama", "mla"] = "llama"
    """`llama` (grouped-query) or `mla` (DeepSeek/Kimi latent attention)."""
    aux_layers: tuple[NonNegativeInt, ...] | None = None
    """Boundaries (0..L) whose residual streams feed the drafter; null means (2, L//2, L-3)."""
    draft_vocab_size: PositiveInt | None = None
    """Most frequent target tokens the drafter may propose; null means the whole vocabulary."""
    num_layers: PositiveInt = 1
    """Decoder layers of the drafter."""
    intermediate_size: PositiveInt | None = None
    """Width of the drafter's MLP; null means the target's dense MLP width."""
    num_heads: PositiveInt | None = None
    """Attention heads; null means the target's."""
    num_kv_heads: PositiveInt | None = None
    """Key/value heads (llama attention); null means the target's."""
    norm_output: bool = False
    """EAGLE-3.1: feed the normalised state to the next step."""
    fc_norm: bool = False
    """EAGLE-3.1: RMS-normalise each aux state before fc."""
    norm_before_fc: bool = False
    """EAGLE-3.1: one RMS norm over the concatenated aux states before fc."""
    max_position_embeddings: PositiveInt | None = None
    """Positions the exported drafter serves; null means the target's."""
    init_from: str | None = None
    """Directory of an existing EAGLE-3 checkpoint to warm-start from."""


class SamplingConfig(Section):
    """How the target answers a prompt."""

    temperature: NonNegativeFloat = 0.0
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling mass."""
    top_k: NonNegativeInt = 0
    """0 keeps every token."""
    max_new_tokens: PositiveInt = 256
    """Longest answer, tokens."""


class CorpusConfig(Section):
    """Which conversations are read and how they become tokens."""

    sources: tuple[str, ...] = ()
    """Files, directories, globs or fsspec URLs of conversations or prompts."""
    answers: Literal["target", "given"] = "target"
    """Whose answers are trained on: the target's own (rollout), or those that came with the data."""
    max_len: PositiveInt = 2048
    """Longest sample in tokens; longer ones are truncated (ids, mask and states together)."""
    limit: PositiveInt | None = None
    """Read at most this many usable rows, in source order; null reads all."""
    held_out_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of samples kept for evaluation, chosen by a stable hash of the conversation."""
    deduplicate: bool = True
    """Drop conversations whose content was already seen (counted as `duplicate`)."""
    roles: dict[str, Literal["system", "user", "assistant", "tool"]] = {}
    """Extra role names (lower case), each mapped to system, user, assistant or tool."""
    leading_assistant: Literal["drop_turn", "skip_row"] = "skip_row"
    """A conversation that starts with the assistant: drop that turn, or skip the row."""
    several_system_turns: Literal["merge", "skip_row"] = "merge"
    """More than one system turn: join them with a blank line, or skip the row."""
    system_prompt: str | None = None
    """System prompt added to conversations that have none; null adds nothing."""
    template_kwargs: dict[str, Any] = {}
    """Extra arguments of the chat template, e.g. {enable_thinking: true}."""
    history: Literal["given", "regenerate"] = "given"
    """Rollouts of conversations: keep given earlier answers, or let the target write every answer."""
    supervise_inserted_think: bool = False
    """Given answers: supervise an empty think block that the template inserted by itself."""
    min_yield: float = Field(0.9, ge=0, le=1)
    """Fail when a smaller share of rows is usable; 0 allows anything but nothing at all."""


class RolloutConfig(Section):
    """The target's own answers to the prompts."""

    sampling: SamplingConfig = SamplingConfig()
    """Sampling of every domain without an entry in `domain_sampling`; held-out prompts are always greedy."""
    domain_sampling: dict[str, SamplingConfig] = {}
    """Sampling per domain label."""
    self_synthesised: NonNegativeInt = 0
    """Prompts the target writes itself, sampled after the bare user header."""
    openers: dict[str, tuple[str, ...]] = {}
    """Domain -> beginnings of the user turns it writes, used in turns; empty writes freely."""
    synthesis: SamplingConfig = SamplingConfig(temperature=1.0, max_new_tokens=128)
    """Sampling of self-synthesised prompts."""
    seed: int = 0
    """Seed of sampled answers and synthesised prompts."""
    shard_rows: PositiveInt = 512
    """Answers per committed Parquet shard: what a kill can cost."""
    max_failures: float = Field(0.05, ge=0, le=1)
    """Fail the stage when a larger share of prompts could not be answered."""


class EngineConfig(Section):
    """The vLLM engines that answer, capture and serve."""

    replicas: PositiveInt = 1
    """Engine actors that work side by side."""
    tensor_parallel: PositiveInt = 1
    """GPUs of one replica; they sit on one node."""
    gpus_per_worker: NonNegativeFloat = 0.0
    """GPUs each tensor-parallel worker reserves; a fraction shares a GPU with a trainer."""
    cpus: NonNegativeFloat = 1.0
    """CPUs one replica reserves."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute type of the target."""
    max_model_len: PositiveInt = 2048
    """Longest sequence the engine accepts, tokens."""
    max_num_seqs: PositiveInt = 64
    """Requests decoded together."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens scheduled in one engine step; null means 8192 (2048 on CPU), or max_model_len if longer."""
    kv_cache_bytes: PositiveInt | None = None
    """KV cache of one worker; null lets gpu_memory_utilization decide (1 GiB on CPU)."""
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    """Share of a GPU's memory the engine may take."""
    enforce_eager: bool = False
    """Skip compilation and CUDA graphs: quicker start, slower decode."""
    prefix_caching: bool = False
    """Reuse the KV cache of shared prefixes."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` loads random weights, for tests and benchmarks."""
    start_timeout_s: PositiveFloat = 1800.0
    """Longest wait for a replica to load."""
    request_timeout_s: PositiveFloat = 1800.0
    """Longest single engine step before its replica counts as dead."""
    max_replacements: NonNegativeInt = 3
    """Dead replicas replaced before the job gives up."""


class StreamConfig(Section):
    """The data plane between engines and trainers."""

    max_bytes_in_flight: PositiveInt
    """Hidden-state bytes between engine hand-off and optimiser-step acknowledgement, cluster-wide."""
    tokens_per_pack: PositiveInt = 2048
    """Token budget of one pack: one forward/backward of one rank."""
    dtype: StateType = "bfloat16"
    """Type of hidden states in flight; float8_e4m3fn has a scale for each token and boundary."""
    cache_bytes: NonNegativeInt = 0
    """Disk bytes, all nodes together, that keep the states of the same samples for every later epoch."""
    cache_dir: str | None = None
    """Directory on each node's local disk for the cache; null is the system's temporary directory."""
    replay: PositiveInt = 1
    """Epochs trained on each window while it is in memory: fewer captures, correlated order."""
    lookahead_packs: PositiveInt = 8
    """Captures a rank's pipeline keeps asked for at once."""


class TrainConfig(Section):
    """Optimisation of the drafter."""

    epochs: PositiveInt = 1
    """Passes over the samples; every sample is trained exactly this often."""
    workers: PositiveInt = 1
    """Ray Train workers (FSDP ranks)."""
    gpus_per_worker: NonNegativeFloat = 0.0
    """GPUs of one worker; 0 trains on CPU."""
    cpus_per_worker: PositiveFloat = 1.0
    """CPUs one worker reserves, and as many threads when it trains on CPU."""
    accumulation: PositiveInt = 1
    """Packs per rank and optimiser step."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate as a share of the peak."""
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    """Share of the optimiser steps spent warming up."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW decay."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW moments."""
    grad_clip: PositiveFloat = 0.5
    """Largest gradient norm."""
    ttt_steps: PositiveInt = 7
    """Unroll depth of training-time test."""
    decay: float = Field(0.8, gt=0, le=1)
    """Weight of TTT step k is decay**k."""
    loss: Literal["forward_kl", "hard_ce", "reverse_kl", "jsd", "tv", "lk_alpha", "lk_lambda"] = (
        "forward_kl"
    )
    """Distance between teacher and drafter."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute type of the drafter; masters and loss are float32."""
    fp8: bool = False
    """Multiply the drafter's matrices in e4m3; 1.3x on an H200, within noise of bf16's loss (docs/log.md); needs sizes of 16."""
    seed: int = 0
    """Seed of initialisation and of each epoch's order."""
    eval_every: PositiveInt = 50
    """Optimiser steps between held-out evaluations."""
    eval_samples: NonNegativeInt = 32
    """Held-out samples per evaluation."""
    early_stop_evals: NonNegativeInt = 0
    """Stop after so many evaluations in a row without a longer expected acceptance length; 0 never does."""
    checkpoint_every: PositiveInt = 50
    """Optimiser steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Best checkpoints kept, by held-out acceptance, beside the newest."""
    log_every: PositiveInt = 1
    """Optimiser steps between metrics lines."""
    max_failures: NonNegativeInt = 3
    """Worker-group restarts before the job gives up."""
    max_bad_samples: float = Field(0.005, ge=0, le=1)
    """Share of captured samples that may be skipped as non-finite or mismatched."""


class PreflightConfig(Section):
    """What is checked before anything is spent, and the cluster it is checked against."""

    skip: tuple[str, ...] = ()
    """Names of checks whose failure does not stop a job."""
    vllm_version: str | None = None
    """Judge against the shipped table of this vLLM; null means the installed one."""
    sglang_version: str | None = None
    """Judge serving against the shipped table of this SGLang; null means the installed or newest one."""
    nodes: PositiveInt = 1
    """Nodes of the cluster."""
    gpus_per_node: NonNegativeInt | None = None
    """GPUs of one node, where no cluster is connected; null means those of this machine."""
    gpu_memory_bytes: PositiveInt | None = None
    """Memory of one GPU; null means that of this machine's."""
    samples: PositiveInt | None = None
    """Samples the plan assumes; null means corpus.limit."""
    mean_tokens: PositiveInt | None = None
    """Mean tokens of a sample in the plan; null means corpus.max_len."""
    capture_tokens_per_s: PositiveFloat | None = None
    """Measured capture rate of one replica; null predicts no hours."""
    train_tokens_per_s: PositiveFloat | None = None
    """Measured training rate of one worker; null predicts no hours."""


class ExportConfig(Section):
    """The drafter in the form vLLM and SGLang load."""

    format: Literal["eagle3", "speculators"] = "eagle3"
    """`eagle3` serves in vLLM and SGLang; `speculators` is that library's layout, for vLLM and llama drafters."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the exported weights."""
    checkpoint: Literal["best", "last"] = "best"
    """Which checkpoint is exported."""
    max_shard_bytes: PositiveInt = 5_000_000_000
    """Largest safetensors file."""


class EvaluateConfig(Section):
    """What is measured in the engine."""

    sources: tuple[str, ...] = Field(("held_out",), min_length=1)
    """Prompts to evaluate on: files, each a dataset, and `held_out`, the rollout's held-out prompts by domain."""
    num_prompts: PositiveInt = 80
    """Prompts per domain at most; those of a file are spread evenly over it."""
    sampling: SamplingConfig = SamplingConfig()
    """How the target answers while measured."""
    num_speculative_tokens: PositiveInt = 3
    """Draft tokens served."""
    concurrency: tuple[Annotated[int, Field(ge=1, le=56)], ...] = Field((1,), min_length=1)
    """Requests in flight, one measurement each (at most 56: a replica answers 64 callers at once)."""
    seconds: PositiveFloat = 5.0
    """How long each measurement above concurrency 1 lasts at least; its prompts are repeated until then."""
    untrained: bool = True
    """Also serve the drafter as it was before training."""
    sampled_answers: NonNegativeInt = 0
    """Short sampled answers per prompt, with and without drafter, tested for having one distribution; 0 tests only what
    `sampling` itself measures at a temperature."""
    against: str | None = None
    """Directory of another drafter for the same target, measured on the same prompts."""


class ReportConfig(Section):
    """How the record of a run is presented."""

    against: Path | None = None
    """Directory of another run; changes beyond 5 % are flagged."""


class LogConfig(Section):
    """Where a run is followed."""

    wandb_project: str = "eagle3-train"
    """W&B project; the API key comes from the environment, never from here."""
    wandb_mode: Literal["online", "offline", "disabled"] = "offline"
    """Offline runs are written below the run directory and synced later."""
    level: Literal["DEBUG", "INFO", "WARNING"] = "INFO"
    """Console level."""


class JobConfig(Section):
    """One job: sections are stages."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run and of its directory."""
    runs_dir: Annotated[Path, AfterValidator(Path.resolve)] = Field(
        Path("runs"), validate_default=True
    )
    """Parent of run directories; on storage every node sees when there are several nodes."""
    preflight: PreflightConfig = PreflightConfig()
    target: TargetConfig
    drafter: DrafterConfig = DrafterConfig()
    corpus: CorpusConfig = CorpusConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    stream: StreamConfig
    train: TrainConfig = TrainConfig()
    export: ExportConfig = ExportConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    report: ReportConfig = ReportConfig()
    log: LogConfig = LogConfig()

    @property
    def run_path(self) -> Path:
        """Directory of this run."""
        return self.runs_dir / self.name
