"""What training starts from: draft vocabulary, frozen target tensors, the drafter's first weights.

The driver writes them once; every rank of every attempt, and the untrained export, read the same files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_train.config import JobConfig
from eagle3_train.corpus.render import Renderer
from eagle3_train.corpus.vocab import DraftVocab
from eagle3_train.drafter.checkpoint import membership, read_checkpoint
from eagle3_train.drafter.frozen import FrozenTarget
from eagle3_train.drafter.model import Eagle3Drafter, init_from_target
from eagle3_train.drafter.spec import DrafterSpec
from eagle3_train.records import Sample
from eagle3_train.rundir import RunDir, reading
from eagle3_train.runlog import log
from eagle3_train.target.derive import drafter_spec
from eagle3_train.target.facts import read_facts
from eagle3_train.target.weights import read_frozen


def spec_of(config: JobConfig) -> DrafterSpec:
    """Shape of this job's drafter."""
    return drafter_spec(read_facts(config.target.path), config.drafter)


def renderer_of(config: JobConfig) -> Renderer:
    """Tokenizer and chat template of this job."""
    return Renderer.load(
        config.target.tokenizer or config.target.path,
        config.target.trust_remote_code,
        config.corpus.template_kwargs,
    )


def frozen_target(config: JobConfig, dtype: torch.dtype) -> FrozenTarget:
    """The target's tensors and the run's draft vocabulary, on CPU."""
    if spec_of(config).full_vocab:
        return _frozen(config, dtype, None)
    vocab = DraftVocab.load(RunDir(config.run_path).draft_vocab, renderer_of(config).fingerprint)
    return _frozen(config, dtype, torch.from_numpy(vocab.d2t))


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
    weights = read_frozen(config.target.path, dtype)
    return FrozenTarget(
        embed=weights.embed,
        lm_head=weights.lm_head,
        norm_weight=weights.norm_weight,
        norm_eps=read_facts(config.target.path).rms_norm_eps,
        d2t=d2t,
    )


def write_initial(config: JobConfig, train: list[Sample]) -> None:
    """Write the draft vocabulary and the initial weights, unless an earlier attempt has.

    Raises ValueError when what was trained so far belongs to another draft vocabulary or warm start.
    """
    run, spec = RunDir(config.run_path), spec_of(config)
    warm = (
        read_checkpoint(Path(config.drafter.init_from), spec) if config.drafter.init_from else None
    )
    vocabulary = "all"
    if not spec.full_vocab:
        vocab = _vocabulary(config, spec, train, warm.d2t if warm else None)
        vocabulary = vocab.fingerprint
        if run.initial_weights.exists():
            vocab.check_weights(run.initial_weights)
        if not (run.draft_vocab.exists() and run.initial_weights.exists()):
            vocab.save(run.draft_vocab)
    origin = config.drafter.init_from or ""
    if run.initial_weights.exists():
        with reading(run.initial_weights), safe_open(run.initial_weights, "numpy") as file:
            began = (file.metadata() or {}).get("init_from", "")
        if began != origin:
            raise ValueError(
                f"drafter.init_from is {origin or 'null'}, but this run began from {began or 'null'}; give the run a new "
                f"name, or delete {run.train_storage} and train again"
            )
        return
    if any(run.train_storage.glob("*/checkpoint_*")):
        raise ValueError(
            f"{run.train_storage} holds checkpoints but not the weights they began with; give the run a new "
            f"name, or delete {run.train_storage}"
        )
    drafter = Eagle3Drafter(spec)
    frozen = frozen_target(config, torch.float32)
    init_from_target(drafter, frozen, torch.Generator().manual_seed(config.train.seed))
    if warm:
        drafter.load_state_dict(warm.weights, strict=False)
    run.initial_weights.parent.mkdir(parents=True, exist_ok=True)
    temporary = run.initial_weights.with_suffix(".tmp")
    weights = {name: tensor.detach() for name, tensor in drafter.state_dict().items()}
    save_file(weights, temporary, {"vocabulary": vocabulary, "init_from": origin})
    temporary.replace(run.initial_weights)


def _vocabulary(
    config: JobConfig, spec: DrafterSpec, train: list[Sample], given: Tensor | None
) -> DraftVocab:
    """The run's draft vocabulary; at first a warm start's own, or the tokens supervised most often."""
    renderer, run = renderer_of(config), RunDir(config.run_path)
    begun = run.initial_weights.exists()
    if run.draft_vocab.exists() and (begun or given is None):
        return DraftVocab.load(run.draft_vocab, renderer.fingerprint)
    if given is not None:
        t2d = membership(given, spec.vocab_size).numpy()
        return DraftVocab(given.numpy(), t2d, {}, renderer.fingerprint)
    vocab = DraftVocab.build(
        train,
        spec.draft_vocab_size,
        spec.vocab_size,
        renderer.always_drafted,
        renderer.fingerprint,
    )
    log.info(
        "draft vocabulary: %d of %d tokens cover %.2f %% of the supervised text",
        spec.draft_vocab_size,
        spec.vocab_size,
        100 * vocab.coverage["all"],
    )
    return vocab


def load_initial(config: JobConfig, drafter: Eagle3Drafter) -> None:
    """Load what write_initial wrote."""
    drafter.load_state_dict(load_file(RunDir(config.run_path).initial_weights))
