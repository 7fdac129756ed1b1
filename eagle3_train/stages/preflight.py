"""`preflight`: will this target, engine, drafter, data and cluster work together, and at what cost?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3_train.config import JobConfig
from eagle3_train.engines.resolve import Resolution, engine_index, resolve_target
from eagle3_train.preflight.check import Check, failed, table
from eagle3_train.preflight.plan import Plan, plan_checks
from eagle3_train.preflight.static import static_checks
from eagle3_train.rundir import RunDir, write_atomic
from eagle3_train.runlog import log
from eagle3_train.target.facts import TargetFacts, read_facts, resolve_boundaries

Depth = Literal["static", "plan", "live"]
LOG_EVERY_S = 30.0


@dataclass(slots=True)
class Report:
    """What preflight found; `depths` holds the checks of each depth that ran, `skip` is preflight.skip."""

    skip: tuple[str, ...] = ()
    depths: dict[str, list[Check]] = field(default_factory=dict)
    engines: list[Resolution] = field(default_factory=list)
    boundaries: tuple[int, ...] = ()
    plan: Plan | None = None

    @property
    def checks(self) -> list[Check]:
        """Every check, in order."""
        return [check for checks in self.depths.values() for check in checks]

    @property
    def blocking(self) -> list[Check]:
        """Failed checks that preflight.skip does not name."""
        return [c for c in self.checks if c.verdict == "fail" and c.name not in self.skip]

    def summary(self) -> str:
        """What failed, and what preflight.skip lets pass."""
        names = failed(self.checks)
        blocking = [name for name in names if name not in self.skip]
        skipped = [name for name in names if name in self.skip]
        lines = [f"failed: {', '.join(blocking)}"] if blocking else []
        lines += [f"failed, but preflight.skip names it: {', '.join(skipped)}"] if skipped else []
        return "; ".join(lines) or "nothing failed"

    def json(self) -> str:
        """The report for machines."""
        captures = self.engines[0] if self.engines else None
        content = {
            "resolved_class": captures.resolved_class if captures else "",
            "supports_eagle3": bool(captures and captures.supports_eagle3),
            "boundaries": list(self.boundaries),
            "bytes_per_token": self.plan.bytes_per_token if self.plan else None,
            "checks": [
                {"depth": depth, **asdict(check)}
                for depth, checks in self.depths.items()
                for check in checks
            ],
            "engines": self.engines,
            "plan": self.plan and vars(self.plan),
        }
        return json.dumps(content, indent=1, default=asdict)

    def text(self) -> str:
        """The report for people."""
        return "\n".join(table(depth, checks) for depth, checks in self.depths.items())


def run(config: JobConfig, depth: Depth, package: Path | None = None) -> Report:
    """Run every depth up to `depth`; `package` is the directory the job would upload, None in a job that trains.

    The live depth does not start when an earlier check blocks.
    """
    report = Report(config.preflight.skip)
    try:
        facts = read_facts(config.target.path)
    except ValueError as error:
        report.depths["static"] = [Check("target", "fail", str(error), "see target.path")]
        return report
    captures = engine_index("vllm", config.preflight.vllm_version)
    if captures is None:
        reason = f"vLLM {config.preflight.vllm_version or ''} is neither installed nor in a shipped table"
        fix = "install vLLM, or name a version of eagle3_train/engines/*.json in preflight.vllm_version"
        report.depths["static"] = [Check("engine_class", "fail", reason, fix)]
        return report
    serves = engine_index("sglang", config.preflight.sglang_version)
    engines = [captures] if serves is None else [captures, serves]
    report.engines = [resolve_target(facts, index) for index in engines]
    report.depths["static"] = static_checks(config, facts, engines)
    if serves is None:
        reason = f"no shipped table knows SGLang {config.preflight.sglang_version}"
        fix = "name a version of eagle3_train/engines/*.json in preflight.sglang_version"
        report.depths["static"].append(Check("serve_sglang", "fail", reason, fix))
    try:
        report.boundaries = resolve_boundaries(config.drafter.aux_layers, facts.num_layers)
        report.plan = Plan(config, facts)
        if depth != "static":
            report.depths["plan"] = plan_checks(config, facts, report.plan, package)
    except ValueError as error:
        if depth != "static":
            reason = f"left out, so neither memory nor the stream's budget is checked: {error}"
            fix = "repair what the static depth names"
            report.depths["plan"] = [Check("plan", "fail", reason, fix)]
    if depth == "live" and report.blocking:
        reason = "not run, since checks above failed"
        fix = "repair them, or name them in preflight.skip"
        report.depths["live"] = [Check("engine_start", "warn", reason, fix)]
    elif depth == "live":
        report.depths["live"] = _live(config, facts)
    return report


def unusable(reason: str) -> Report:
    """The report on a configuration that cannot be read."""
    return Report(
        depths={"configuration": [Check("configuration", "fail", reason, "see docs/config.md")]}
    )


def _live(config: JobConfig, facts: TargetFacts) -> list[Check]:
    """Inside a cluster every node is asked for its versions too."""
    # Only this depth needs them, and they take seconds to import.
    import ray

    from eagle3_train.preflight.live import live_checks
    from eagle3_train.preflight.nodes import node_versions, object_store

    if ray.is_initialized():
        store = object_store(config.stream.max_bytes_in_flight)
        return [node_versions(), store, *in_cluster(config, live_checks, config, facts)]
    reason = "no cluster joined: neither its nodes' versions nor its object store are compared"
    alone = Check("versions", "warn", reason, "submit it with ray job submit to check a cluster")
    return [alone, *live_checks(config, facts)]


def in_cluster(config: JobConfig, checks: Callable[..., list[Check]], *of: Any) -> list[Check]:
    """What `checks` finds in a process of its own that reserves what an engine replica does."""
    import ray
    from ray.exceptions import RayError

    from eagle3_train.engines.pool import ENVIRONMENT

    gpus = config.engine.tensor_parallel if config.engine.gpus_per_worker else 0
    threads = str(max(1, int(config.engine.cpus)))
    boot = ray.remote(
        num_gpus=gpus,
        num_cpus=config.engine.cpus,
        max_retries=0,
        max_calls=1,  # the process takes what vLLM leaves behind with it
        runtime_env={"env_vars": ENVIRONMENT | {"OMP_NUM_THREADS": threads}},
    )(checks)
    running = boot.remote(*of)
    while not ray.wait([running], timeout=LOG_EVERY_S)[0]:
        log.info(
            "preflight: live checks run, or wait for %g GPUs and %g CPUs (free: %s)",
            gpus, config.engine.cpus, ray.available_resources(),
        )  # fmt: skip
    try:
        found: list[Check] = ray.get(running)
    except RayError as error:
        reason = f"its process ended: {str(error).splitlines()[0]}"
        return [Check("engine_start", "fail", reason, "see the log above; is there memory?")]
    return found


def require(config: JobConfig) -> None:
    """First step of a job: raise ValueError naming every failed check that preflight.skip does not."""
    import ray

    from eagle3_train.preflight.nodes import object_store

    report = run(config, "plan")
    if ray.is_initialized():
        store = object_store(config.stream.max_bytes_in_flight)
        report.depths.setdefault("plan", []).append(store)
    write_atomic(RunDir(config.run_path).preflight, report.json())
    for check in report.checks:
        if check.verdict != "ok":
            log.warning("preflight: %s: %s -> %s", check.name, check.reason, check.action)
    if report.blocking:
        reasons = "; ".join(f"{c.name}: {c.reason} -> {c.action}" for c in report.blocking)
        raise ValueError(
            f"preflight failed: {reasons}. Fix it, or name the check in preflight.skip"
        )
    log.info("preflight: %d checks: %s", len(report.checks), report.summary())
