"""Methods added to vLLM's workers (`worker_extension_cls`); called through `collective_rpc`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_train.engines import versions


@dataclass(frozen=True, slots=True)
class Drafted:
    """One list of draft tokens: the state at `position` with the embedding of `next_token` began it."""

    request_id: str
    position: int
    next_token: int
    draft_ids: tuple[int, ...]


class WorkerExtension:
    """Mixed into the worker class; `model_runner` and `vllm_config` are the worker's."""

    model_runner: Any
    vllm_config: Any

    def target_class(self) -> str:
        """Name of the class vLLM chose for the target."""
        return type(self.model_runner.get_model()).__name__

    def load_drafter(self, directory: str) -> None:
        """Replace the drafter's weights and d2t by those of another checkpoint of the same shape."""
        from safetensors.torch import load_file

        drafter = versions.drafter_of(self.model_runner)
        config = self.vllm_config.speculative_config.draft_model_config
        files = sorted(Path(directory).glob("*.safetensors"))
        # By name, so that a layer comes whole.
        weights = [pair for file in files for pair in sorted(load_file(file).items())]
        versions.reload(drafter.model, weights, config)

    def record_drafts(self) -> None:
        """From now on keep what the drafter proposes (V1 model runner)."""
        runner = self.model_runner
        propose = runner.drafter.propose
        self.drafted: list[tuple[str, int, int, list[int]]] = []

        def recording(*args: Any, **kwargs: Any) -> Any:
            positions = kwargs["target_positions"].clone()
            next_tokens = kwargs["next_token_ids"].clone()
            rows = kwargs["token_indices_to_sample"]
            if rows is None:
                rows = kwargs["common_attn_metadata"].query_start_loc[1:] - 1
            rows = rows.clone()
            request_ids = list(runner.input_batch.req_ids)
            drafts = propose(*args, **kwargs)
            self.drafted += [
                (request_ids[i], int(positions[row]), int(next_tokens[i]), drafts[i].tolist())
                for i, row in enumerate(rows.tolist())
            ]
            return drafts

        runner.drafter.propose = recording

    def take_drafts(self) -> list[tuple[str, int, int, list[int]]]:
        """Fields of what was recorded since the last call; plain, so that they can leave the core's process."""
        drafted, self.drafted = self.drafted, []
        return drafted
