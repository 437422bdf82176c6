"""The distribution: README, public names, docstrings, pinned versions, file sizes."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.models.counting import count_parameters
from implicit_blocks.testing import check_solver

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

# Names of released versions: removing one breaks users' code. A new component's names come from its
# registration; they are added here with a release.
PUBLIC_NAMES = [
    "Adjoint",
    "Anderson",
    "AndersonSpec",
    "AtEvaluation",
    "Attention",
    "AttentionSpec",
    "Broyden",
    "BroydenSpec",
    "ComponentSpec",
    "ConvergenceWarning",
    "Depth",
    "DepthSpec",
    "Exit",
    "ExitSpec",
    "ExplicitLM",
    "ExplicitLMSpec",
    "FixedPoint",
    "Generated",
    "GradientEstimator",
    "GradientSpec",
    "Hybrid",
    "HybridSpec",
    "ImplicitFunction",
    "ImplicitFunctionSpec",
    "ImplicitLM",
    "ImplicitLMSpec",
    "Injection",
    "InjectionSpec",
    "Iterate",
    "IterationBudget",
    "JacobianPenalty",
    "JacobianPenaltySpec",
    "LMOutput",
    "LayerSpec",
    "LoopCounts",
    "MLPSpec",
    "Mamba2",
    "Mamba2Spec",
    "Map",
    "Mixer",
    "MixerSpec",
    "ModelSpec",
    "Objective",
    "ObjectiveSpec",
    "PatientPicard",
    "PatientPicardSpec",
    "Phantom",
    "PhantomSpec",
    "Picard",
    "PicardSpec",
    "Readout",
    "RopeScaling",
    "RandomDepthSpec",
    "RowMap",
    "Scaling",
    "ScalingSpec",
    "Scored",
    "Search",
    "SearchLike",
    "SearchingSolver",
    "SequenceMap",
    "Solution",
    "Solver",
    "SolverSpec",
    "StackSpec",
    "Start",
    "StartSpec",
    "SteppingMap",
    "Stopping",
    "StoppingOverrides",
    "SwiGLUSpec",
    "Unrolled",
    "UnrolledSpec",
    "Window",
    "build",
    "exit_distribution",
    "first_exit",
    "generate",
    "hookimpl",
    "inspect",
    "jacobian_free",
    "load_model",
    "load_spec",
    "score",
    "solve_fixed_point",
    "stream",
]


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Return the words of every shell command in README and CONTRIBUTING."""
    lines = itertools.chain.from_iterable(
        block.splitlines() for text in (README, CONTRIBUTING) for block in blocks(text, "sh")
    )
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


# -------------------------------------------------------------------------------- README


def test_readme_python_runs_in_order():
    namespace: dict[str, object] = {}
    examples = blocks(README, "python")
    assert len(examples) >= 3
    for number, code in enumerate(examples, 1):
        exec(compile(code, f"README.md, example {number}", "exec"), namespace)
    simultaneous, sequential = namespace["simultaneous"], namespace["sequential"]
    both = simultaneous.solution.converged & sequential.solution.converged
    tolerance = namespace["spec"].model.evaluation_stopping.tolerance
    torch.testing.assert_close(
        simultaneous.logits[both], sequential.logits[both], atol=50 * tolerance, rtol=0
    )
    registered: list[tuple[object, ...]] = []
    namespace["register_components"](lambda *component: registered.append(component))
    assert registered == [("solver", namespace["HalfwaySpec"], namespace["Halfway"].from_spec)]
    check_solver(namespace["Halfway"]())


def test_readme_yaml_is_a_spec(tmp_path):
    (example,) = blocks(README, "yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(example, encoding="utf-8")
    spec = ib.load_spec(path)
    assert (spec.model.mixer.kind, spec.model.solver.kind, spec.data.group) == ("attention", "anderson", "A4")


def test_readme_entry_point_uses_the_group_of_the_hook():
    (example,) = blocks(README, "toml")
    assert "implicit_blocks" in tomllib.loads(example)["project"]["entry-points"]


def test_documented_commands_exist():
    targets = set(
        re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    seen = set()
    for words in commands():
        seen.add(words[0])
        if words[0] == "make":
            assert words[1] in targets, words
        elif words[0] == "python":
            assert words[1] == "-m", words
            assert importlib.util.find_spec(words[2]) is not None, words
    for program in re.findall(r"`python (benchmarks/\w+\.py)", README):
        assert (ROOT / program).is_file(), program
    assert seen >= {"make", "python"}


def written_by_new_plugin() -> set[str]:
    """Return the run specs of the plugins that documented commands create; tests/new_plugin trains those."""
    return {f"word_problem_s3_{w[w.index('new-plugin') + 1]}" for w in commands() if "new-plugin" in w}


@pytest.mark.parametrize(
    "words",
    [w for w in commands() if "--spec" in w and w[w.index("--spec") + 1] not in written_by_new_plugin()],
    ids=" ".join,
)
def test_documented_runs_are_valid(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = words[words.index("--spec") + 1]
    assert ib.load_spec(spec, [word for word in words if re.match(r"[a-z_.]+=", word)]).model


def test_links_point_to_files():
    for text in (README, CONTRIBUTING, CHANGELOG):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / target).exists(), target


def test_readme_lists_the_zoo_with_its_parameters():
    rows = re.findall(
        r"^\| `(\w+[\w.]*)` \| (\d+) \S (\d+) \| ([\d.]+) M(?: \(([\d.]+) M\))? \|", README, re.MULTILINE
    )
    assert len(rows) >= 10  # a selection: the table on the documentation's page of the zoo has every spec
    for name, layers, width, implicit, explicit in rows:
        model = ib.load_spec(name).model
        assert (model.n_layers, model.d_model) == (int(layers), int(width))
        models = {implicit: model}
        if explicit:
            models[explicit] = ib.load_spec(f"{name}_explicit").model
        for millions, one in models.items():
            total = count_parameters(one).total / 1e6
            assert millions == f"{total:.{1 if total >= 0.1 else 2}f}", name


# -------------------------------------------------------------------------------- the library


def component_names() -> set[str]:
    """Return the names of the registered components of this distribution: spec classes and their builders."""
    entries = [
        registry.entry(family, kind) for family in registry.families() for kind in registry.kinds(family)
    ]
    ours = [entry for entry in entries if entry.owner == registry.OWN_DISTRIBUTION]
    builders = {entry.builder.partition(":")[2].partition(".")[0] for entry in ours}
    return builders | {entry.spec.__name__ for entry in ours}


def test_public_names_are_the_pinned_ones_and_those_of_new_components():
    assert set(PUBLIC_NAMES) <= set(ib.__all__)
    assert set(ib.__all__) - set(PUBLIC_NAMES) <= component_names()


def test_public_names_resolve():
    for name in ib.__all__:
        assert getattr(ib, name) is not None
    assert dir(ib) == sorted(ib.__all__)
    assert ib.__version__ in (PYPROJECT["project"]["version"], "unknown")  # unknown: not installed


def test_an_unknown_public_name_suggests_the_nearest_one():
    with pytest.raises(AttributeError, match="no attribute 'Andersen'") as caught:
        _ = ib.Andersen
    assert (caught.value.name, caught.value.obj) == ("Andersen", ib)  # Python suggests names of this module


def test_importing_the_library_imports_no_torch():
    code = "import sys, implicit_blocks as ib; ib.AndersonSpec, ib.__all__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


FAMILIES = ["solvers", "gradients", "exits", "mixers", "injections", "starts", "depths", "scalings"]


@pytest.mark.parametrize("package", FAMILIES)
def test_type_checkers_see_every_component_of_a_package(package):
    """At run time the names come from the registration; type checkers need definitions and imports."""
    tree = ast.parse((ROOT / "implicit_blocks" / package / "__init__.py").read_text(encoding="utf-8"))
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    (typing_only,) = (
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    imports = [*typing_only.body, *(node for node in tree.body if isinstance(node, ast.ImportFrom))]
    imported = {alias.asname for node in imports for alias in node.names if alias.asname is not None}
    assert defined | imported == set(importlib.import_module(f"implicit_blocks.{package}").__all__)


def sources() -> list[Path]:
    """Return the installed Python files, including those of the plugins."""
    folders = [ROOT / "implicit_blocks", ROOT / "trainer", ROOT / "zoo", *ROOT.glob("plugins/*/src/*")]
    return sorted(path for folder in folders if folder.is_dir() for path in folder.rglob("*.py"))


def test_everything_public_has_a_docstring():
    missing = []
    for path in sources():
        module = ast.parse(path.read_text(encoding="utf-8"))
        public = [
            node
            for node in module.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        ]
        names = [node.name for node in public if not ast.get_docstring(node)]
        names += [] if ast.get_docstring(module) else ["the module"]
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in names]
    assert not missing


def test_no_file_is_longer_than_500_lines():
    folders = ("implicit_blocks", "trainer", "zoo", "plugins", "tests", "benchmarks")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): n
        for path in files
        if (n := len(path.read_text("utf-8").splitlines())) > 500
    }
    assert not long


# -------------------------------------------------------------------------------- the distribution


def pinned() -> dict[str, str]:
    """Return name and version of every line of the constraints."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line.strip() and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_constraints_pin_every_dependency_within_its_bounds():
    project, versions = PYPROJECT["project"], pinned()
    extras = project["optional-dependencies"]
    listed = [
        *PYPROJECT["build-system"]["requires"],
        *project["dependencies"],
        *extras["train"],
        *extras["eval"],
        *extras["dev"],
    ]
    for text in listed:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        if name != "implicit-blocks":
            assert requirement.specifier.contains(versions[name]), text
    assert versions["torch"] == "2.13.0"
    assert set(extras) >= {"train", "hf", "eval", "cuda", "dev"}


def test_plugins_require_available_versions():
    for path in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        (asked,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "implicit_blocks")
        assert asked.specifier.contains(PYPROJECT["project"]["version"])
        assert (path.parent / project["readme"]).is_file()
