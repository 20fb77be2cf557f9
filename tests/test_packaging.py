"""What pyproject.toml, constraints.txt, the Makefile and the README say of each other holds."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def normal(requirement: str) -> str:
    """`Faiss_CPU>=1` as `faiss-cpu`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def test_every_requirement_is_pinned():
    pinned = {normal(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = [*PROJECT["project"]["dependencies"], *extras["dev"], *extras["bench"], *extras["eval"]]
    assert {normal(one) for one in wanted} - pinned == {"kvq-cli"}


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
