"""What training starts from: draft vocabulary, frozen target tensors, the drafter's first weights.

The driver writes them once; every rank of every attempt, and the untrained export, read the same files.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import torch
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
from eagle3_train.rundir import RunDir
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
    facts = read_facts(config.target.path)
    weights = read_frozen(config.target.path, dtype)
    vocab = None
    if not spec_of(config).full_vocab:
        vocab = DraftVocab.load(
            RunDir(config.run_path).draft_vocab, renderer_of(config).fingerprint
        )
    return FrozenTarget(
        embed=weights.embed,
        lm_head=weights.lm_head,
        norm_weight=weights.norm_weight,
        norm_eps=facts.rms_norm_eps,
        d2t=None if vocab is None else torch.from_numpy(vocab.d2t),
        t2d=None if vocab is None else torch.from_numpy(vocab.t2d),
    )


def write_initial(config: JobConfig, train: list[Sample]) -> None:
    """Write the draft vocabulary and the initial weights, unless an earlier attempt has."""
    run, spec = RunDir(config.run_path), spec_of(config)
    warm = _warm_start(Path(config.drafter.init_from), spec) if config.drafter.init_from else None
    if not spec.full_vocab and not run.draft_vocab.exists():
        vocab = _vocabulary(config, spec, train, warm.d2t if warm else None)
        vocab.save(run.draft_vocab)
    if run.initial_weights.exists():
        return
    drafter = Eagle3Drafter(spec)
    frozen = frozen_target(config, torch.float32)
    init_from_target(drafter, frozen, torch.Generator().manual_seed(config.train.seed))
    if warm:
        drafter.load_state_dict(warm.weights, strict=False)
    run.initial_weights.parent.mkdir(parents=True, exist_ok=True)
    temporary = run.initial_weights.with_suffix(".tmp")
    save_file({name: tensor.detach() for name, tensor in drafter.state_dict().items()}, temporary)
    temporary.replace(run.initial_weights)


class _WarmStart(NamedTuple):
    weights: dict[str, Tensor]
    d2t: Tensor | None


def _warm_start(directory: Path, spec: DrafterSpec) -> _WarmStart:
    """Weights and draft vocabulary of an existing drafter. Raises ValueError when its shape differs."""
    found, weights, d2t, _ = read_checkpoint(directory)
    differing = [
        f"{field.name}: {getattr(found, field.name)} there, {getattr(spec, field.name)} here"
        for field in dataclasses.fields(spec)
        if field.name not in ("target_hidden_size", "max_position_embeddings", "rope")
        and getattr(found, field.name) != getattr(spec, field.name)
    ]
    if differing:
        raise ValueError(
            f"drafter.init_from={directory} has another shape ({'; '.join(differing)}); "
            "set the drafter section to its sizes"
        )
    return _WarmStart(weights, d2t)


def _vocabulary(
    config: JobConfig, spec: DrafterSpec, train: list[Sample], given: Tensor | None
) -> DraftVocab:
    """A warm start's own draft vocabulary, or the tokens supervised most often."""
    renderer = renderer_of(config)
    if given is not None:
        t2d = membership(given, spec.vocab_size).numpy()
        return DraftVocab(given.numpy(), t2d, {}, renderer.fingerprint, "warm start")
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
