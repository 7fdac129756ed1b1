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
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from eagle3_train.target.facts import TargetFacts

Engine = Literal["vllm", "sglang"]
Backend = Literal["native", "transformers", "unsupported"]
LayerIds = Literal["", "boundary", "output", "output_always", "deepseek"]
# Switches of EAGLE-3.1 drafters; an engine version serves those its drafter's file names. A file that names the
# last one rotates by YaRN whatever the drafter's config says (vLLM 0.23's MLA drafter).
DRAFTER_OPTIONS = ("norm_output", "fc_norm", "norm_before_fc", "deepseek_yarn")
_TABLES = Path(__file__).parent
_REGISTRY = Path("model_executor/models/registry.py")
# "Architecture": ("module", "Class"), unless it is commented out
_ENTRY = re.compile(r'^[^#\n]*"(\w+)":\s*\(\s*"([\w.]+)",\s*"(\w+)",?\s*\)', re.MULTILINE)
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
    backend: Backend
    needs_code: bool
    supports_eagle3: bool
    layer_ids: LayerIds


def engine_index(engine: Engine, version: str | None = None) -> EngineIndex | None:
    """Index of an engine: the installed one, or `version` from a shipped table (the newest when None).

    Returns None when neither exists.
    """
    root = _installed(engine)
    if root and version in (None, package_version(root)):
        return EngineIndex(engine, package_version(root), "installed", _PackageSource(root).find)
    tables = {file.stem.partition("-")[2]: file for file in _TABLES.glob(f"{engine}-*.json")}
    newest = max(tables, key=lambda found: [int(part) for part in found.split(".")], default="")
    file = tables.get(version or newest)
    return _shipped(file) if file else None


def resolve_target(facts: TargetFacts, index: EngineIndex) -> Resolution:
    """How `index`'s engine would load the target; the target's own code is looked at, never run."""
    found, backend, needs_code = _choose(facts, index)
    # A wrapper promises what only the language model inside it can keep.
    inner = [index.find(name) for name in facts.text_architectures]
    untapped = any(language_model and not language_model.layer_ids for language_model in inner)
    ids = "" if untapped else found.layer_ids
    return Resolution(
        engine=index.engine,
        version=index.version,
        origin=index.origin,
        resolved_class=found.resolved_class,
        backend=backend,
        needs_code=needs_code,
        supports_eagle3=bool(ids),
        layer_ids=ids,
    )


def _choose(facts: TargetFacts, index: EngineIndex) -> tuple[EngineClass, Backend, bool]:
    """The class, what runs it, and whether it would execute the target's own Python files."""
    for architecture in facts.architectures:
        if native := index.find(architecture):
            return native, "native", False
    kind = ("MultiModal" if facts.is_multimodal else "") + ("MoE" if facts.moe else "")
    fallback = index.find(f"Transformers{kind}ForCausalLM") or index.find("TransformersForCausalLM")
    if fallback and any(_transformers_knows(name) for name in facts.architectures):
        return fallback, "transformers", False
    if fallback and _ships_fitting_code(facts):
        return fallback, "transformers", True
    return EngineClass("", ""), "unsupported", False


def _installed(package: str) -> Path | None:
    """Directory of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _transformers_knows(architecture: str) -> bool:
    root = _installed("transformers")
    names = Path("models", "auto", "modeling_auto.py")
    return root is not None and f'"{architecture}"' in (root / names).read_text()


def _ships_fitting_code(facts: TargetFacts) -> bool:
    """Whether the target names a model file of its own that, if present, lets an engine replace its attention."""
    for key, module in facts.auto_map.items():
        if key.startswith("AutoModel"):
            file = facts.path / f"{module.rpartition('--')[2].split('.')[0]}.py"
            fits = r"_supports_(attention_backend|sdpa|flex_attn)\s*=\s*True"
            return not file.is_file() or bool(re.search(fits, file.read_text(errors="replace")))
    return False


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
        self._names = cache(_names)
        self.registry = self._vllm_registry() if self.is_vllm else self._sglang_registry()

    def find(self, architecture: str) -> EngineClass | None:
        if architecture not in self.registry:
            return None
        file, name = self.registry[architecture]
        lineage = list(self._lineage(file, name))
        module = ".".join(file.relative_to(self.root.parent).with_suffix("").parts)
        own = next((f.read_text() for f, _ in lineage), "")
        options = [o for o in DRAFTER_OPTIONS if o in own] if "Eagle3" in architecture else []
        ids: LayerIds = "boundary" if any(c.name == "SupportsEagle3" for _, c in lineage) else ""
        if not self.is_vllm:
            ids = self._sglang_ids(lineage)
        return EngineClass(f"{module.removesuffix('.__init__')}.{name}", ids, tuple(options))

    def _vllm_registry(self) -> dict[str, tuple[Path, str]]:
        """Every entry of the registry's dictionaries whose module is there."""
        found = {}
        for architecture, module, name in _ENTRY.findall((self.root / _REGISTRY).read_text()):
            package = "" if module.startswith("vllm.") else "vllm.model_executor.models."
            if file := self._file(package + module, self.root):
                found[architecture] = (file, name)
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
            file, name = here = queue.pop(0)
            if here in seen:
                continue
            seen.add(here)
            named = self._names(file).get(name, [])
            own = [meant for meant in named if isinstance(meant, ast.ClassDef)]
            for meant in own[:1] or named:
                if isinstance(meant, ast.ClassDef):
                    yield file, meant
                    bases = [ast.unparse(base).split("[")[0] for base in meant.bases]
                    queue += [(file, base.split(".")[-1]) for base in bases]
                elif source := self._file(meant[0], file):
                    queue.append((source, meant[1]))

    def _file(self, module: str, importer: Path) -> Path | None:
        """Source file of a module of this package as `importer` names it; None for other packages."""
        names = module.lstrip(".")
        base = self.root.parent
        if dots := len(module) - len(names):
            base = importer.parents[dots - 1]
        elif module.split(".")[0] != self.root.name:
            return None
        path = base / names.replace(".", "/")
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in files if file.is_file()), None)


def _names(file: Path) -> dict[str, list[ast.ClassDef | tuple[str, str]]]:
    """What each name of a file may stand for: a class, or (module, name) of what is imported or renamed."""
    found: dict[str, list[ast.ClassDef | tuple[str, str]]] = defaultdict(list)
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ClassDef():
                found[node.name].append(node)
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Name(id=meant)):
                found[name].append((f".{file.stem}", meant))
            case ast.ImportFrom():
                source = "." * node.level + (node.module or "")
                for alias in node.names:
                    found[alias.asname or alias.name].append((source, alias.name))
    return found


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
