"""vLLM KV connector that moves the hidden states of finished requests into the hand-over arena.

Runs inside vLLM: the scheduler's half names the blocks of a finished request, the worker's half (TP rank 0)
copies them. The states of a request cover every token that was an input: prompt and answer but the last
token. Blocks are kept until the copy is done, so a slow consumer slows the scheduler instead of losing
states. On CUDA the copy runs on a stream of its own, beside the next forward pass, straight into the pinned arena.

  scheduler: request_finished -> Save -> metadata     worker: Save + grant -> copy -> done -> blocks are free
"""

# ruff: noqa: ARG002, ARG003 - the signatures are vLLM's

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.sched.scheduler import Scheduler

from eagle3_train.engines import versions
from eagle3_train.engines.handover import Place, connect, view
from eagle3_train.stream.states import checksum, encode, storage

STAGING_BYTES = 64 << 20
cuda: Any = torch.cuda  # untyped in torch


@dataclass(frozen=True, slots=True)
class Save:
    """A finished request whose states are wanted: who, which tokens, in which blocks."""

    request_id: str
    key: str
    token_ids: list[int]
    block_ids: list[int]


@dataclass
class Saves(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to worker, once per step."""

    saves: list[Save] = field(default_factory=list)


class CaptureScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's, but it decodes one token per step and ignores the fake drafter's proposals.

    `extract_hidden_states` proposes one token per step only so that states get written; verifying it would make
    every decode step compute two tokens instead of one.
    """

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Forget what the fake drafter proposed."""


class HiddenStateConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Store-only connector; one instance per scheduler and per worker."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._group, self._block_size = versions.hidden_state_group(kv_cache_config)
        self._extra: dict[str, Any] = self._kv_transfer_config.kv_connector_extra_config
        self._finished: list[Save] = []
        self._copier: Copier | None = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Keep the boundaries of one token together."""
        return versions.kv_layout()

    def get_finished_count(self) -> int | None:
        """Only TP rank 0 reports."""
        return 1

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the hidden-state cache; rank 0 joins the hand-over."""
        from vllm.config import get_layers_from_vllm_config
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
        from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer

        layers = get_layers_from_vllm_config(
            self._vllm_config, CacheOnlyAttentionLayer, list(kv_caches)
        )
        assert len(layers) == 1, f"expected one hidden-state layer, found {sorted(layers)}"
        if get_tensor_model_parallel_rank() == 0:
            cache = versions.by_token(kv_caches[next(iter(layers))], self._block_size)
            self._copier = Copier(cache, self._extra)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start this step's copies before its forward pass is launched, so that both overlap."""
        super().bind_connector_metadata(connector_metadata)
        if self._copier is not None:
            assert isinstance(connector_metadata, Saves)
            self._copier.start(connector_metadata.saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose blocks may be freed."""
        done = self._copier.finished() if self._copier is not None else set()
        return done or None, None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded; the fake drafter writes the states into the cache, and whole requests are saved."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _nothing

    def shutdown(self) -> None:
        """Leave the hand-over."""
        if self._copier is not None:
            self._copier.close()
            self._copier = None

    # Scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No tokens come from outside."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """No tokens come from outside."""
        assert num_external_tokens == 0

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Tell the worker which requests have finished."""
        saves, self._finished = self._finished, []
        return Saves(saves)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: keep its blocks when its states are wanted and all there.

        An aborted request, or one that ended before every input was computed, has none.
        """
        from vllm.v1.request import RequestStatus

        wanted = (request.kv_transfer_params or {}).get("capture_key")
        blocks = block_ids[self._group] if self._group < len(block_ids) else []
        if not wanted or not blocks or request.status == RequestStatus.FINISHED_ABORTED:
            return False, None
        token_ids = list(request.all_token_ids)[:-1]
        if request.num_computed_tokens < len(token_ids):
            return False, None
        self._finished.append(Save(request.request_id, wanted, token_ids, list(blocks)))
        return True, {"is_captured": True}


@dataclass(slots=True, eq=False)
class Copy:
    """One copy under way; the checksum may be read when it is done."""

    save: Save
    checksum: Tensor
    is_done: Callable[[], bool]


class Copier:
    """Copies saves into granted regions, in the order in which both are there."""

    def __init__(self, cache: Tensor, extra: dict[str, Any]) -> None:
        """cache: [blocks, block, boundaries, hidden]."""
        self._cache = cache
        self._block = cache.shape[1]
        self._dtype, columns = storage(extra["dtype"], cache.shape[-1])
        self._row = (cache.shape[2], columns)
        self._channel, self._arena = connect(extra["address"], extra["token"])
        self._saves: dict[str, Save] = {}
        self._grants: dict[str, Place] = {}
        self._copies: list[Copy] = []
        self._dropped: set[str] = set()
        self._stream: Any = None
        if cache.is_cuda:
            self._pin()

    def start(self, saves: list[Save]) -> None:
        """Take note of finished requests and start every copy that has its grant."""
        self._saves.update({save.key: save for save in saves})
        while self._channel.poll():
            key, place = self._channel.recv()
            if place is not None:
                self._grants[key] = place
                continue
            self._grants.pop(key, None)
            if save := self._saves.pop(key, None):
                self._dropped.add(save.request_id)
        for key in [key for key in self._saves if key in self._grants]:
            self._begin(self._saves.pop(key), self._grants.pop(key))

    def finished(self) -> set[str]:
        """Request ids whose blocks are no longer needed; reports the finished copies."""
        over = [copy for copy in self._copies if copy.is_done()]
        self._copies = [c for c in self._copies if c not in over]
        for copy in over:
            finite = bool(torch.isfinite(copy.checksum))
            self._channel.send((copy.save.key, "" if finite else "hidden states are not finite"))
        dropped, self._dropped = self._dropped, set()
        return dropped | {copy.save.request_id for copy in over}

    def close(self) -> None:
        """Wait for running copies, unpin, disconnect."""
        if self._stream is not None:
            self._stream.synchronize()
            cuda.cudart().cudaHostUnregister(self._arena.data_ptr())
        self._channel.close()

    def _begin(self, save: Save, place: Place) -> None:
        tokens = len(save.token_ids)
        if tokens != place.tokens:
            self._channel.send((save.key, f"{tokens} tokens captured, {place.tokens} expected"))
            self._dropped.add(save.request_id)
            return
        out = view(self._arena, place.hidden, (tokens, *self._row), self._dtype)
        ids = view(self._arena, place.ids, (tokens,), torch.int32)
        ids.copy_(torch.from_numpy(np.asarray(save.token_ids, dtype=np.int32)))
        if self._stream is None:
            encode(self._cache[save.block_ids].flatten(0, 1)[:tokens], out)
            self._copies.append(Copy(save, checksum(out), lambda: True))
        else:
            self._copies.append(self._copy_cuda(save, out))

    def _pin(self) -> None:
        """Make the arena DMA-able and set up the side stream and its two reused staging buffers."""
        arena = self._arena
        status = cuda.cudart().cudaHostRegister(arena.data_ptr(), len(arena), 0)
        if int(status) != 0:
            raise RuntimeError(
                f"cannot pin {len(arena)} bytes of host memory ({status}); lower stream.tokens_per_pack or "
                "engine.max_num_batched_tokens, or raise the locked-memory limit"
            )
        self._stream = cuda.Stream()
        block_bytes = self._cache[0].numel() * self._cache.element_size()
        blocks = max(1, STAGING_BYTES // block_bytes)
        place: dict[str, Any] = {"device": self._cache.device}
        shape = (blocks, *self._cache.shape[1:])
        self._staging = torch.empty(shape, dtype=self._cache.dtype, **place)
        self._converted = (
            self._staging
            if self._cache.dtype == self._dtype
            else torch.empty((blocks, self._block, *self._row), dtype=self._dtype, **place)
        )

    def _copy_cuda(self, save: Save, out: Tensor) -> Copy:
        """Gather and copy on the side stream, behind everything launched so far."""
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            index = torch.tensor(save.block_ids, dtype=torch.int64).pin_memory()
            index = index.to(self._cache.device, non_blocking=True)
            total = torch.zeros((), dtype=torch.float32, device=self._cache.device)
            step = len(self._staging)
            for first in range(0, -(-len(out) // self._block), step):
                part = index[first : first + step]
                torch.index_select(self._cache, 0, part, out=self._staging[: len(part)])
                if self._converted is not self._staging:
                    encode(self._staging[: len(part)], self._converted[: len(part)])
                rows = self._converted[: len(part)].flatten(0, 1)
                target = out[first * self._block : (first + len(part)) * self._block]
                rows = rows[: len(target)]
                target.copy_(rows, non_blocking=True)
                total += checksum(rows)
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
            host.copy_(total, non_blocking=True)
            done = self._stream.record_event()
        return Copy(save, host, done.query)
