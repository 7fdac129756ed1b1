"""vLLM's worker as every engine of ours runs it: taps where they lack, drafters swapped, drafts recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.model_executor.model_loader import utils as loading
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform

from eagle3_train.engines import versions
from eagle3_train.engines.hooks import tapped

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class EngineWorker(PlatformWorker):  # type: ignore[misc]
    """Hands out every boundary that is asked for. Its other methods are called through `collective_rpc`."""

    def load_model(self, **kwargs: Any) -> None:
        """Put the tapped subclass in the place of the one class the user named; load; mend what this release lacks."""
        config = self.vllm_config.model_config
        found, architecture = config.registry.resolve_model_cls(config.architectures, config)
        named = self.vllm_config.additional_config["tap_by_hooks"]
        if named and not supports_eagle3(found):
            if found.__name__ != named:
                raise ValueError(
                    f"target.tap_by_hooks={named!r}, but vLLM loads {found.__name__}: name that one"
                )
            config.registry.register_model(architecture, tapped(found))
            loading._MODEL_ARCH_BY_HASH.clear()  # of a wrapper, vLLM has resolved the class already
        super().load_model(**kwargs)
        versions.tap_last_layer(self.get_model())
        versions.mend_sampling()
        versions.mend_draft_capture(self.model_runner)

    def target_class(self) -> str:
        """Name of the class vLLM chose for the target."""
        return type(self.model_runner.get_model()).__name__

    def load_drafter(self, directory: str) -> None:
        """Replace the drafter's weights and d2t by those of another checkpoint of the same shape."""
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
