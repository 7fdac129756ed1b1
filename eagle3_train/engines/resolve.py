"""Which class an engine would load for a target, and which layers it would tap: read from source, never imported.

The installed package is read by AST, so a patched install is seen as it is; for an engine that is not installed
there are tables beside this file, generated from released wheels by
`python -m eagle3_train.engines.resolve PACKAGE_DIRECTORY` (e.g. an unpacked wheel's `vllm/` or `sglang/`).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from eagle3_train.target.facts import TargetFacts, default_boundaries

Engine = Literal["vllm", "sglang"]
LayerIds = Literal["", "boundary", "output", "output_always", "deepseek"]
# Switches of EAGLE-3.1 drafters; an engine version serves those its drafter's file names. A file that names the
# last one rotates by YaRN whatever the drafter's config says (vLLM 0.23's MLA drafter).
DRAFTER_OPTIONS = ("norm_output", "fc_norm", "norm_before_fc", "deepseek_yarn")
_TABLES = Path(__file__).parent
_REGISTRY = Path("model_executor/models/registry.py")
_CAPTURE = "set_eagle3_layers_to_capture"


@dataclass(frozen=True, slots=True)
class EngineClass:
    """A registered class. layer_ids says how it reads explicit aux ids ("" when it cannot capture):

    boundary: as they are; output: id + 1; output_always: id + 1 even on its own default;
    deepseek: id + 1 only when the first id is 1.
    """

    resolved_class: str
    layer_ids: LayerIds
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineIndex:
    """Classes of one engine version by architecture; origin is "installed" or "shipped table"."""

    engine: Engine
    version: str
    origin: str
    find: Callable[[str], EngineClass | None]


@dataclass(frozen=True, slots=True)
class Resolution:
    """How one engine version would load a target.

    resolved_class is "" and backend "unsupported" when it would not. needs_code: the target's own Python
    files would be executed. layer_ids: see EngineClass.
    """

    engine: Engine
    version: str
    origin: str
    resolved_class: str
    backend: Literal["native", "transformers", "unsupported"]
    needs_code: bool
    supports_eagle3: bool
    layer_ids: LayerIds


def engine_index(engine: Engine, version: str | None = None) -> EngineIndex | None:
    """Index of an engine: the installed one, or `version` from a shipped table (the newest when None).

    Returns None when neither exists.
    """
    spec = importlib.util.find_spec(engine)
    if spec is not None and spec.origin is not None:
        root = Path(spec.origin).parent
        installed = package_version(root)
        if version in (None, installed):
            source = _PackageSource(root)
            return EngineIndex(engine, installed, "installed", source.find)
    tables = sorted(_TABLES.glob(f"{engine}-*.json"), key=lambda file: _numbers(file.stem))
    wanted = [file for file in tables if version in (None, file.stem.partition("-")[2])]
    return _shipped(wanted[-1]) if wanted else None


def resolve_target(facts: TargetFacts, index: EngineIndex) -> Resolution:
    """How `index`'s engine would load the target; the target's own code is looked at, never run."""

    # A wrapper promises what only the language model inside it can keep.
    inner = [index.find(name) for name in facts.text_architectures]
    untapped = any(language_model and not language_model.layer_ids for language_model in inner)

    def result(found: EngineClass | None, backend: str, needs_code: bool = False) -> Resolution:
        name, ids = (found.resolved_class, found.layer_ids) if found else ("", "")
        ids = "" if untapped else ids
        return Resolution(
            *(index.engine, index.version, index.origin, name, backend),  # type: ignore[arg-type]
            needs_code=needs_code,
            supports_eagle3=bool(ids),
            layer_ids=ids,
        )

    for architecture in facts.architectures:
        found = index.find(architecture)
        if found is not None:
            return result(found, "native")
    kind = ("MultiModal" if facts.is_multimodal else "") + ("MoE" if facts.moe else "")
    fallback = index.find(f"Transformers{kind}ForCausalLM") or index.find("TransformersForCausalLM")
    if fallback is not None:
        if any(transformers_knows(architecture) for architecture in facts.architectures):
            return result(fallback, "transformers")
        if any(key.startswith("AutoModel") for key in facts.auto_map) and backend_compatible(facts):
            return result(fallback, "transformers", needs_code=True)
    return result(None, "unsupported")


def tapped_boundaries(
    layer_ids: LayerIds, ids: tuple[int, ...] | None, num_layers: int
) -> tuple[int, ...]:
    """Boundaries the engine taps when a drafter's config says `ids` (None: says nothing)."""
    given = default_boundaries(num_layers) if ids is None else ids
    shifted = layer_ids == "output_always" or (
        ids is not None and (layer_ids == "output" or (layer_ids == "deepseek" and ids[0] == 1))
    )
    return tuple(i + 1 for i in given) if shifted else given


def transformers_knows(architecture: str) -> bool:
    """Whether the installed transformers has a class of that name (its source is read, not imported)."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    names = Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py"
    return f'"{architecture}"' in names.read_text()


def backend_compatible(facts: TargetFacts) -> bool:
    """Whether the target's own model file, when present, lets an engine replace its attention."""
    module = next(v for k, v in facts.auto_map.items() if k.startswith("AutoModel"))
    file = facts.path / f"{module.rpartition('--')[2].split('.')[0]}.py"
    return not file.is_file() or bool(
        re.search(r"_supports_(attention_backend|sdpa|flex_attn)\s*=\s*True", file.read_text())
    )


def package_version(root: Path) -> str:
    """Version of the package in `root`, from its `_version.py`."""
    match = re.search(r"version = '([^'+]+)", (root / "_version.py").read_text())
    if match is None:
        raise ValueError(f"{root}/_version.py names no version; is this an installed engine?")
    return match[1]


class _PackageSource:
    """An engine's package as source text: registry, classes, bases."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.is_vllm = root.name == "vllm"
        self._module = lru_cache(maxsize=None)(_parse)
        self.registry = self._vllm_registry() if self.is_vllm else self._sglang_registry()

    def find(self, architecture: str) -> EngineClass | None:
        if architecture not in self.registry:
            return None
        file, name = self.registry[architecture]
        lineage = list(self._lineage(file, name))
        module = ".".join(file.relative_to(self.root.parent).with_suffix("").parts)
        own = next((f.read_text() for f, _ in lineage), "")
        options = [o for o in DRAFTER_OPTIONS if o in own] if "Eagle3" in architecture else []
        ids = self._vllm_ids(lineage) if self.is_vllm else self._sglang_ids(lineage)
        return EngineClass(f"{module.removesuffix('.__init__')}.{name}", ids, tuple(options))

    def _vllm_registry(self) -> dict[str, tuple[Path, str]]:
        """Every `"Architecture": ("module", "Class")` entry of the registry's dictionaries."""
        found = {}
        for node in ast.walk(ast.parse((self.root / _REGISTRY).read_text())):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    names = [e.value for e in value.elts if isinstance(e, ast.Constant)]
                    if len(names) == len(value.elts) == 2:
                        module = str(names[0])
                        if not module.startswith("vllm."):
                            module = f"vllm.model_executor.models.{module}"
                        file = self._file(module)
                        if file is not None:
                            found[str(key.value)] = (file, str(names[1]))
        return found

    def _sglang_registry(self) -> dict[str, tuple[Path, str]]:
        """Every class named by a module's `EntryClass`."""
        found = {}
        for file in sorted((self.root / "srt" / "models").glob("*.py")):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                    names = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
                    found.update({name: (file, name) for name in names})
        return found

    def _vllm_ids(self, lineage: list[tuple[Path, ast.ClassDef]]) -> LayerIds:
        return "boundary" if any(c.name == "SupportsEagle3" for _, c in lineage) else ""

    def _sglang_ids(self, lineage: list[tuple[Path, ast.ClassDef]]) -> LayerIds:
        for file, node in lineage:
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == _CAPTURE:
                    body = ast.unparse(method)
                    if f"language_model.{_CAPTURE}" in body:
                        return self._delegate_ids(file, node)
                    return _convention(body)
        return ""

    def _delegate_ids(self, file: Path, node: ast.ClassDef) -> LayerIds:
        """Convention of the language model a wrapper constructs."""
        for assign in ast.walk(node):
            if isinstance(assign, ast.Assign) and isinstance(assign.value, ast.Call):
                target, callee = ast.unparse(assign.targets[0]), ast.unparse(assign.value.func)
                if target == "self.language_model" and callee.isidentifier():
                    return self._sglang_ids(list(self._lineage(file, callee)))
        return ""

    def _lineage(self, file: Path, name: str) -> Iterator[tuple[Path, ast.ClassDef]]:
        """The class and its bases, nearest first, through imports and aliases inside the package."""
        queue, seen = [(file, name)], set()
        while queue:
            here = queue.pop(0)
            if here in seen:
                continue
            seen.add(here)
            module = self._module(here[0])
            node = module.classes.get(here[1])
            if node is not None:
                yield here[0], node
                queue += [
                    (here[0], ast.unparse(b).split("[")[0].split(".")[-1]) for b in node.bases
                ]
            elif here[1] in module.aliases:
                queue.append((here[0], module.aliases[here[1]]))
            else:
                for source, original in module.imports.get(here[1], ()):
                    imported = self._file(source, relative_to=here[0])
                    if imported is not None:
                        queue.append((imported, original))

    def _file(self, module: str, relative_to: Path | None = None) -> Path | None:
        """Source file of a module of this package; None for other packages."""
        names = module.lstrip(".")
        base = self.root.parent
        if module.startswith("."):
            assert relative_to is not None
            base = relative_to.parents[len(module) - len(names) - 1]
        elif module.split(".")[0] != self.root.name:
            return None
        path = base.joinpath(*names.split(".")) if names else base
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in files if file.is_file()), None)


@dataclass(frozen=True, slots=True)
class _Module:
    classes: dict[str, ast.ClassDef]
    aliases: dict[str, str]
    imports: dict[str, list[tuple[str, str]]]


def _parse(file: Path) -> _Module:
    module = _Module({}, {}, {})
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef):
            module.classes.setdefault(node.name, node)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            if isinstance(node.targets[0], ast.Name):
                module.aliases[node.targets[0].id] = node.value.id
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            for alias in node.names:
                name = alias.asname or alias.name
                module.imports.setdefault(name, []).append((source, alias.name))
    return module


def _convention(body: str) -> LayerIds:
    """How SGLang's set_eagle3_layers_to_capture reads explicit ids, from its text."""
    if "layer_ids[0] == 1" in body:
        return "deepseek"
    if re.search(r"\b(\w+) \+ 1 for \1 in layer_ids", body):
        return "output_always" if "layer_ids = [2" in body else "output"
    return ""


def _shipped(file: Path) -> EngineIndex:
    table = json.loads(file.read_text())
    classes = {
        name: EngineClass(row["resolved_class"], row["layer_ids"], tuple(row["options"]))
        for name, row in table["architectures"].items()
    }
    return EngineIndex(table["engine"], table["version"], "shipped table", classes.get)


def _numbers(stem: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", stem))


def generate_table(root: Path, into: Path = _TABLES) -> Path:
    """Write the shipped table of the package in `root`; returns the file."""
    source = _PackageSource(root)
    rows = {name: source.find(name) for name in sorted(source.registry)}
    lines = [f"  {json.dumps(n)}: {json.dumps(asdict(row))}" for n, row in rows.items() if row]
    version = package_version(root)
    head = f'{{"engine": "{root.name}", "version": "{version}", "architectures": {{\n'
    file = into / f"{root.name}-{version}.json"
    file.write_text(head + ",\n".join(lines) + "\n}}\n")
    return file


if __name__ == "__main__":
    sys.stdout.write(f"{generate_table(Path(sys.argv[1]).resolve())}\n")
