"""From an EngineSpec to a running vLLM engine: arguments, backend traps, one clear message on failure."""

from __future__ import annotations

from typing import Any

from eagle3_train.engines import versions
from eagle3_train.engines.spec import EngineSpec, Request
from eagle3_train.target.facts import TargetFacts, bytes_per_token

CPU_KV_CACHE_BYTES = 1 << 30
# Asked for of target and drafter on CPU: where the CPU has AMX, vLLM else runs MLA in a kernel that takes bf16 alone.
MLA_IN_FLOAT32 = {"attention_backend": "CPU_MLA"}
# Settings of the engine section that vLLM calls by the same name.
SAME_IN_VLLM = {"dtype", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "enforce_eager"}


class EngineError(RuntimeError):
    """An engine that cannot start, or that has died; the message says what to do."""


def check(spec: EngineSpec, facts: TargetFacts) -> None:
    """Refuse, before anything is loaded, what can be known to fail. Raises ValueError."""
    if spec.purpose == "capture" and spec.boundaries[-1:] != (facts.num_layers,):
        raise ValueError(
            f"a capture engine needs boundaries that end with L={facts.num_layers} "
            f"({spec.target.path} has {facts.num_layers} layers), got {spec.boundaries}"
        )
    if spec.target.tap_by_hooks and not spec.engine.enforce_eager:
        raise ValueError("forward hooks cannot be compiled: set engine.enforce_eager=true")
    if spec.engine.max_model_len > facts.max_position_embeddings:
        raise ValueError(
            f"engine.max_model_len={spec.engine.max_model_len} exceeds the {facts.max_position_embeddings} "
            f"positions of {spec.target.path}; lower it"
        )


def batched_tokens(spec: EngineSpec) -> int:
    """Tokens of one engine step; whole prompts must fit where chunking is off."""
    usual = 2048 if versions.on_cpu() else 8192
    chosen = spec.engine.max_num_batched_tokens or max(usual, spec.engine.max_model_len)
    return chosen if chunks_prefill(spec) else max(chosen, spec.engine.max_model_len)


def chunks_prefill(spec: EngineSpec) -> bool:
    """Whether prompts may be prefilled in parts.

    On CPU seeded sampling crashes with it; while drafting, vLLM 0.32 leaves a wrong entry in the drafter's
    KV cache after every part but the last.
    """
    if spec.chunked_prefill is not None:
        return spec.chunked_prefill
    return spec.purpose != "serve" and not versions.on_cpu()


def arena_bytes(spec: EngineSpec, hidden_size: int) -> int:
    """Host memory for states on their way out: four engine steps or of the longest samples, or two packs."""
    if spec.arena_bytes is not None:
        return spec.arena_bytes
    row = bytes_per_token(hidden_size, len(spec.boundaries), spec.capture_dtype)
    tokens = max(4 * batched_tokens(spec), 4 * spec.engine.max_model_len, 2 * spec.pack_tokens)
    return tokens * (row + 4)  # 4: the token's id


def sampling_params(key: str, request: Request) -> Any:
    """vLLM's SamplingParams; `key` names the states, when they are asked for."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        stop_token_ids=list(request.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": {"capture_key": key}} if request.capture else None,
    )


def arguments(spec: EngineSpec, facts: TargetFacts, connector: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vLLM's EngineArgs."""
    engine, target = spec.engine, spec.target
    kwargs = engine.model_dump(include=SAME_IN_VLLM) | {
        "model": target.path,
        "tokenizer": target.tokenizer or target.path,
        "trust_remote_code": target.trust_remote_code,
        "tensor_parallel_size": engine.tensor_parallel,
        "max_num_batched_tokens": batched_tokens(spec),
        "block_size": spec.block_size,
        "enable_chunked_prefill": chunks_prefill(spec),
        "kv_cache_memory_bytes": engine.kv_cache_bytes,
        "enable_prefix_caching": engine.prefix_caching,
        "load_format": engine.load_format,
        "language_model_only": facts.is_multimodal,
        "seed": spec.seed,
        "use_tqdm_on_load": False,
        "disable_log_stats": spec.purpose != "serve",
        "worker_cls": "eagle3_train.engines.worker.EngineWorker",
        "additional_config": {"tap_by_hooks": target.tap_by_hooks},
    }
    if engine.tensor_parallel > 1:
        kwargs["distributed_executor_backend"] = "mp"
    if versions.on_cpu():
        kwargs["kv_cache_memory_bytes"] = engine.kv_cache_bytes or CPU_KV_CACHE_BYTES
        if engine.dtype == "auto":  # its CPU kernels are only trusted in float32
            kwargs["dtype"] = "float32"
        kwargs |= MLA_IN_FLOAT32
        if facts.mla is not None:  # the C++ RoPE op rotates MLA's keys wrongly
            kwargs["compilation_config"] = {"custom_ops": ["none"]}
    if spec.purpose == "serve":
        kwargs["speculative_config"] = {
            "method": "eagle3",
            "model": spec.drafter,
            "num_speculative_tokens": spec.num_speculative_tokens,
        } | (MLA_IN_FLOAT32 if versions.on_cpu() else {})
    if spec.purpose == "capture":
        kwargs |= _capture_arguments(spec, connector)
    return kwargs


def _capture_arguments(spec: EngineSpec, connector: dict[str, Any]) -> dict[str, Any]:
    if spec.boundaries[0] == 0 and not versions.on_cpu():
        raise ValueError(
            "boundary 0 (the embeddings) cannot be captured on a GPU: vLLM keeps its buffer, not a copy, and the "
            "first layers' fused add and norm write into it; choose drafter.aux_layers >= 1"
        )
    return {
        "scheduler_cls": "eagle3_train.engines.connector.CaptureScheduler",
        "async_scheduling": False,  # on by default on GPU, where it takes a scheduler made for it
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "enforce_eager": True,  # graph padding would scatter states into a foreign block (0.23)
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.boundaries)}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStateConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "eagle3_train.engines.connector",
            "kv_connector_extra_config": connector | {"dtype": spec.capture_dtype},
        },
    }


def launch(spec: EngineSpec, facts: TargetFacts, connector: dict[str, Any]) -> Any:
    """A started vLLM LLMEngine. Raises EngineError with vLLM's cause."""
    versions.tolerate_odd_modules()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    kwargs = arguments(spec, facts, connector)
    try:
        return LLMEngine.from_engine_args(EngineArgs(**kwargs))
    except Exception as error:
        raise EngineError(explain(spec, error)) from error


def explain(spec: EngineSpec, error: BaseException) -> str:
    """What went wrong while starting, in one message."""
    text = str(error).strip() or type(error).__name__
    known = (remedy for sign, remedy in _REMEDIES.items() if sign in text)
    advice = next(known, "the log above holds vLLM's own account")
    return (
        f"{versions.name()} could not start a {spec.purpose} engine for {spec.target.path}: "
        f"{text.splitlines()[0][:600]}; {advice}"
    )


_REMEDIES = {
    "does not support EAGLE3": "this target's class taps no layers in this vLLM; run preflight",
    "KV cache": "raise engine.kv_cache_bytes or gpu_memory_utilization, or lower engine.max_model_len",
    "memory": "lower engine.kv_cache_bytes or gpu_memory_utilization, or free memory on the device",
    "trust_remote_code": "set target.trust_remote_code=true to run the target's own Python files",
}
