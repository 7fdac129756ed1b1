"""What training starts from: draft vocabulary, frozen target tensors, the drafter's first weights.

The driver writes draft vocabulary and weights into one file, once; every rank of every attempt, and the untrained
export, read it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_train.config import JobConfig
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.vocab import most_supervised
from eagle3_train.drafter.checkpoint import read_checkpoint
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir, reading, replacing
from eagle3_train.runlog import log
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import locate, read_facts
from eagle3_train.target.weights import read_frozen


def spec_of(config: JobConfig) -> DrafterSpec:
    """Shape of this job's drafter."""
    return drafter_spec(read_facts(config.target.path), config.drafter)


def renderer_of(config: JobConfig) -> Renderer:
    """Tokenizer and chat template of this job."""
    return Renderer.load(
        config.target.tokenizer or str(locate(config.target.path)),
        config.target.trust_remote_code,
        config.corpus.template_kwargs,
    )


def read_drafter(
    config: JobConfig, directory: Path, dtype: torch.dtype
) -> tuple[Eagle3Drafter, FrozenTarget]:
    """Any drafter of this job's target and what it shares with the target, on CPU."""
    checkpoint = read_checkpoint(directory)
    frozen = _frozen(config, dtype, checkpoint.d2t)
    drafter = Eagle3Drafter(checkpoint.spec)
    drafter.load_state_dict({"lm_head.weight": frozen.draft_head, **checkpoint.weights})
    return drafter.to(dtype), frozen


def _frozen(config: JobConfig, dtype: torch.dtype, d2t: Tensor | None) -> FrozenTarget:
    weights, facts = read_frozen(config.target.path, dtype), read_facts(config.target.path)
    return FrozenTarget(*weights, norm_eps=facts.rms_norm_eps, d2t=d2t)


def load_initial(config: JobConfig, drafter: Eagle3Drafter, dtype: torch.dtype) -> FrozenTarget:
    """Load the drafter's first weights; the target's tensors and the run's draft vocabulary, on CPU."""
    weights = load_file(RunDir(config.run_path).initial_weights)
    frozen = _frozen(config, dtype, weights.pop("d2t", None))
    drafter.load_state_dict(weights)
    return frozen


def write_initial(config: JobConfig, train: list[Sample]) -> None:
    """Write the first weights with the draft vocabulary, unless an earlier attempt has.

    Raises ValueError when what was trained so far belongs to another draft vocabulary or warm start.
    """
    run, spec, renderer = RunDir(config.run_path), spec_of(config), renderer_of(config)
    if run.initial_weights.exists():
        check_initial(config, renderer)
        return
    if any(run.train_storage.glob("*/checkpoint_*")):
        raise ValueError(
            f"{run.train_storage} holds checkpoints but not the weights they began with; give the run a new "
            f"name, or delete {run.train_storage}"
        )
    began = config.drafter.init_from
    warm = read_checkpoint(Path(began), spec) if began else None
    d2t, coverage = (warm.d2t, {}) if warm else _draft_vocabulary(spec, train, renderer)
    drafter = Eagle3Drafter(spec)
    frozen = _frozen(config, torch.float32, d2t)
    init_from_target(drafter, frozen, torch.Generator().manual_seed(config.train.seed))
    if warm:
        drafter.load_state_dict(warm.weights, strict=False)
    tensors = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    if d2t is not None:
        tensors["d2t"] = d2t
    made_for = _made_for(config, renderer) | {"coverage": json.dumps(coverage)}
    with replacing(run.initial_weights) as temporary:
        save_file(tensors, temporary, made_for)


def check_initial(config: JobConfig, renderer: Renderer) -> dict[str, float]:
    """Domain -> share of its supervised tokens that the run's draft vocabulary holds; empty after a warm start.

    Raises ValueError unless the first weights, which are there, belong to this job.
    """
    run, made_for = RunDir(config.run_path), _made_for(config, renderer)
    with reading(run.initial_weights), safe_open(run.initial_weights, "numpy") as file:
        metadata = file.metadata() or {}
        began = {what: metadata[what] for what in made_for}
        coverage: dict[str, float] = json.loads(metadata["coverage"])
    for what, value in made_for.items():
        if began[what] != value:
            raise ValueError(
                f"{what} is {value or 'null'}, but this run began with {began[what] or 'null'}; give the run a new name, "
                f"or delete {run.train_storage} and train again"
            )
    return coverage


def _made_for(config: JobConfig, renderer: Renderer) -> dict[str, str]:
    """What must not change while weights are trained."""
    spec = spec_of(config)
    return {
        "drafter.init_from": config.drafter.init_from or "",
        "drafter.draft_vocab_size": str(spec.draft_vocab_size),
        "the hash of tokenizer and template": "" if spec.full_vocab else renderer.fingerprint,
    }


def _draft_vocabulary(
    spec: DrafterSpec, train: list[Sample], renderer: Renderer
) -> tuple[Tensor | None, dict[str, float]]:
    """d2t of the tokens supervised most often, and what they cover by domain."""
    if spec.full_vocab:
        return None, {}
    size, rows = spec.draft_vocab_size, spec.vocab_size
    ids, coverage = most_supervised(train, size, rows, renderer.always_drafted)
    log.info(
        "draft vocabulary: %d of %d tokens cover %.2f %% of the supervised text",
        size,
        rows,
        100 * coverage["all"],
    )
    return torch.from_numpy(ids) - torch.arange(size), coverage
