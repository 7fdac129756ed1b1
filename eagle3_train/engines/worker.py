"""Methods added to vLLM's workers (`worker_extension_cls`); called through `collective_rpc`."""

from __future__ import annotations

import json
from collections.abc import Iterator
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
        drafter = versions.drafter_of(self.model_runner)
        config = self.vllm_config.speculative_config.draft_model_config
        _check_same_shape(config.hf_config, Path(directory))
        versions.reload(drafter.model, _weights(Path(directory)), config)

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
            for index, row in enumerate(rows.tolist()):
                self.drafted.append(
                    (
                        request_ids[index],
                        int(positions[row]),
                        int(next_tokens[index]),
                        drafts[index].tolist(),
                    )
                )
            return drafts

        runner.drafter.propose = recording

    def take_drafts(self) -> list[tuple[str, int, int, list[int]]]:
        """Fields of what was recorded since the last call; plain, so that they can leave the core's process."""
        drafted, self.drafted = self.drafted, []
        return drafted


def _weights(directory: Path) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of every safetensors file, a whole layer at a time."""
    from safetensors import safe_open

    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                yield name, tensors.get_tensor(name)


def _check_same_shape(loaded: Any, directory: Path) -> None:
    """Refuse a checkpoint that needs another module tree than the one that is serving."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} is no drafter checkpoint: it has no config.json")
    config = json.loads(path.read_text())
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if key in config and config[key] != vars(loaded).get(key, config[key]):
            raise ValueError(
                f"{directory}: {key}={config[key]}, the serving drafter has {vars(loaded)[key]}; "
                "start another engine for it"
            )
    if config.get("draft_vocab_size") != loaded.draft_vocab_size:
        raise ValueError(
            f"{directory}: draft_vocab_size={config.get('draft_vocab_size')}, the serving drafter has "
            f"{loaded.draft_vocab_size}; start another engine for it"
        )
