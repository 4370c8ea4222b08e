"""The house: an arrow only ever points down, and importing the core stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import effattn

PACKAGE = Path(effattn.__file__).parent

FLOORS = {
    "masks": 0,
    "dropout": 1,
    "reference": 1,
    "backend": 2,
    "kernels": 3,
    "backends": 4,
    "attention": 5,
    "cost": 5,
    "nn": 6,
    "swap": 6,
    "testing": 6,
    "bench": 7,
    "cli": 8,
}
ROOF = 9  # the package itself, which shows the floors up to 5

HEAVY = ("transformers", "xformers", "pandas", "matplotlib", "seaborn", "pydantic")


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(name: str, source: str, is_package: bool) -> set[str]:
    """Every module that the source imports, also inside functions, by its full name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")[: None if is_package and node.level == 1 else (is_package - node.level)]
                base = ".".join([*parents, *filter(None, [node.module])])
            # "from package import module" names a module, "from module import thing" does not.
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base for alias in node.names}
    return found


def imports_of(name: str) -> set[str]:
    path = MODULES[name]
    return imports(name, path.read_text(), path.name == "__init__.py")


def floor(name: str) -> int:
    parts = name.split(".")
    return FLOORS[parts[1]] if len(parts) > 1 else ROOF


@pytest.mark.parametrize("name", MODULES)
def test_arrows_point_down(name):
    inner = {module for module in imports_of(name) if module.split(".")[0] == "effattn"}
    for module in inner:
        assert module in MODULES, f"{name} imports {module}, which does not exist"
        if module == "effattn":  # as users do: that brings the floors up to 5
            assert floor(name) > 5, f"{name} imports the package that shows it"
        else:
            assert floor(module) <= floor(name), f"{name} (floor {floor(name)}) imports {module} ({floor(module)})"


def test_the_package_shows_the_floors_up_to_5():
    assert all(floor(module) <= 5 for module in imports_of("effattn") if module.startswith("effattn."))


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("effattn.backends.")])
def test_backends_never_import_each_other(name):
    assert not {module for module in imports_of(name) if module.startswith("effattn.backends")}


@pytest.mark.parametrize("name", MODULES)
def test_nothing_imports_experiments_or_tests(name):
    assert not {module for module in imports_of(name) if module.split(".")[0] in ("experiments", "tests")}


def test_imports_are_found_wherever_they_stand():
    source = (
        "import a.b, c\n"
        "from . import masks\n"
        "from .masks import Causal\n"
        "from .kernels import tiles\n"
        "def f():\n"
        "    from effattn.bench import study\n"
        "    from effattn import get\n"
    )
    expected = {"a.b", "c", "effattn.masks", "effattn.kernels.tiles", "effattn.bench.study", "effattn"}
    assert imports("effattn.cli", source, is_package=False) == expected
    assert imports("effattn", source, is_package=True) == expected
    assert imports("effattn.backends.lsh", "from ..kernels.merge import merge", False) == {"effattn.kernels.merge"}
    assert imports("effattn.testing", "from .contract import Case", True) == {"effattn.testing.contract"}


@pytest.mark.parametrize("use", ["import effattn", "import effattn; effattn.names()"])
def test_the_core_imports_nothing_heavy(use):
    script = f"import sys; {use}; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
