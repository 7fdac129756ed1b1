"""The one seam between vLLM releases (0.23 and 0.32 are supported) and between its CPU and GPU backends."""

from __future__ import annotations

import logging
import os
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from eagle3_train.engines.spec import Acceptance

QUIET = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
}


def prepare_environment(own_process: bool | None, v1_runner: bool) -> None:
    """Set what vLLM only reads from the environment; must run before vLLM is imported.

    own_process: whether the core gets a process of its own; null means yes on GPU, no on CPU.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)  # before vLLM has set its own level
    if own_process is None:
        own_process = not on_cpu()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    if v1_runner:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def release() -> tuple[int, int]:
    """(major, minor) of the installed vLLM."""
    from vllm.version import __version_tuple__

    major, minor = __version_tuple__[:2]
    return int(major), int(minor)


def name() -> str:
    """Engine and version, as reports print it."""
    from vllm.version import __version__

    return f"vllm {__version__}"


def on_cpu() -> bool:
    """Whether the installed vLLM computes on CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def tolerate_odd_modules() -> None:
    """Let vLLM 0.32's CPU backend start beside modules whose objects answer every attribute.

    It looks for kernels in `vars(value)` of everything in sys.modules; for llvmlite's library wrappers (loaded by
    Kimi's image processor, through numba) that is no mapping, and the engine would die of it.
    """
    if not on_cpu() or release() < (0, 30):
        return
    from vllm.triton_utils import dispatcher

    def attributes(value: object) -> dict[str, Any]:
        found = vars(value)
        return found if isinstance(found, dict | MappingProxyType) else {}

    dispatcher.vars = attributes


def kv_layout() -> str:
    """Name of the KV-cache layout that keeps the states of one token together."""
    return "LBNHC" if release() >= (0, 30) else "NHD"


def by_token(kv_cache: Tensor, block_size: int) -> Tensor:
    """The hidden-state cache as a view [blocks, block, boundaries, hidden]; not contiguous on CPU."""
    if release() >= (0, 30):  # logically [blocks, boundaries, block, hidden]
        kv_cache = kv_cache.transpose(1, 2)
    if kv_cache.shape[1] != block_size:
        raise RuntimeError(
            f"{name()}: the hidden-state cache is {tuple(kv_cache.shape)}, expected blocks of "
            f"{block_size} tokens; this vLLM version needs a case in engines/versions.py"
        )
    return kv_cache


def hidden_state_group(kv_cache_config: Any) -> tuple[int, int]:
    """(index, block size in tokens) of the KV-cache group that holds the hidden states."""
    from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, UniformTypeKVCacheSpecs

    def holds(spec: Any) -> bool:
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return any(holds(inner) for inner in spec.kv_cache_specs.values())
        return isinstance(spec, HiddenStateCacheSpec)

    groups = kv_cache_config.kv_cache_groups
    found = [index for index, group in enumerate(groups) if holds(group.kv_cache_spec)]
    if not found and len(groups) == 1:
        found = [0]
    if len(found) != 1:
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        raise RuntimeError(f"{name()}: no single KV-cache group holds the hidden states: {kinds}")
    return found[0], int(groups[found[0]].kv_cache_spec.block_size)


def mend_sampling() -> None:
    """Verify drafts at the request's temperature on CPU; elsewhere vLLM does.

    vLLM 0.32's CPU kernel for this expansion fills an int64 copy and leaves the float result as it was allocated.
    """
    if on_cpu():
        from vllm.v1.sample import rejection_sampler

        rejection_sampler.expand_batch_to_tokens = _expand


def _expand(
    x: Tensor, cu_num_tokens: Tensor, _num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """[requests] -> [tokens]: each request's value at each of its tokens."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)


def core_is_inside(llm: Any) -> bool:
    """Whether vLLM's core runs in this process."""
    from vllm.v1.engine.core_client import InprocClient

    return isinstance(llm.engine_core, InprocClient)


def core_is_busy(llm: Any) -> bool:
    """Whether a core in this process must still be stepped although no request is unfinished."""
    return core_is_inside(llm) and bool(llm.engine_core.engine_core.scheduler.has_requests())


class _LastBoundary(torch.nn.Module):
    """A decoder layer that does nothing: its place is where the last boundary is looked for."""

    def forward(self, _positions: Tensor, hidden: Tensor, residual: Tensor, *_: Any) -> Any:
        return hidden, residual


def tap_last_layer(target: torch.nn.Module) -> None:
    """Make vLLM 0.23's DeepseekV2Model (Kimi's too) tap the boundary after its last layer.

    It looks for taps before each layer only; one more layer, which does nothing, makes it look once more.
    """
    if release() >= (0, 30):
        return
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2Model

    for module in target.modules():
        if (
            isinstance(module, DeepseekV2Model)
            and len(module.layers) in module.aux_hidden_state_layers
        ):
            module.layers.append(_LastBoundary())
            module.end_layer += 1


def mend_draft_capture(runner: Any) -> None:
    """Rebuild the attention metadata for each graph of the draft's prefill (V2 model runner of vLLM 0.23).

    0.23 reuses what the target's capture built; its buffers hold another batch by then, and on an H200 a kernel reads
    out of bounds (vLLM issue 47561, mended there by pull request 48261).
    """
    if release() >= (0, 30) or "speculator" not in vars(runner):
        return
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, prepare_inputs_to_capture
    from vllm.v1.worker.gpu.spec_decode.autoregressive import speculator

    class FreshCapture(speculator.PrefillSpeculatorCudaGraphManager):  # type: ignore[misc]
        """Builds dummy inputs for every warm-up and capture, as the target's manager does."""

        def capture(self, forward: Any, _stale: Any, progress_bar_desc: str) -> None:
            def create(batch: Any, warmup: bool) -> Any:
                del warmup
                requests = batch.num_reqs or min(batch.num_tokens, self.max_num_reqs)
                state = prepare_inputs_to_capture(
                    requests,
                    batch.num_tokens,
                    runner.model_state,
                    runner.input_buffers,
                    runner.block_tables,
                    runner.attn_groups,
                    runner.kv_cache_config,
                    skip_attn=batch.cg_mode == CUDAGraphMode.PIECEWISE,
                )
                return lambda mode: forward(requests, batch.num_tokens, *state, None, mode), state

            CudaGraphManager.capture(self, create, progress_bar_desc)

    speculator.PrefillSpeculatorCudaGraphManager = FreshCapture


def drafter_of(runner: Any) -> Any:
    """The proposer of a model runner, V1 (`drafter`) or V2 (`speculator`)."""
    return runner.drafter if "drafter" in vars(runner) else runner.speculator


def reload(model: torch.nn.Module, weights: Any, model_config: Any) -> None:
    """Load new weights into a live model, packed kernels and captured graphs included."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with torch.device(next(model.parameters()).device):
        initialize_layerwise_reload(model)
        model.load_weights(weights)  # type: ignore[operator]
        finalize_layerwise_reload(model, model_config)


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request it will not take."""
    from vllm.exceptions import VLLMValidationError

    return (ValueError, VLLMValidationError)


def acceptance(llm: Any) -> Acceptance:
    """Speculative counters of an engine that drafts, since it started."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    accepted = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return Acceptance(metrics["vllm:spec_decode_num_drafts"].value, tuple(accepted))


def forget_engine() -> None:
    """Drop the global state an engine in this process leaves behind, and the shared memory its objects hold."""
    import gc

    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()
