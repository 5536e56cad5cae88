"""The files in deploy/ can be read, call commands that exist, and fit each other."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from nsa_tune.cli import app

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
NODES: list[dict[str, Any]] = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
INSTRUCTIONS = {
    "ARG", "FROM", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD", "HEALTHCHECK",
}  # fmt: skip


def _check_command(words: list[str]) -> dict[str, Any]:
    """The options of a command line of nsa-tune, which must be one that it takes."""
    command: Any = typer.main.get_command(app)
    assert Path(words[0]).name == "nsa-tune"
    rest = words[1:]
    while getattr(command, "commands", None):
        assert rest, words
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    context = command.make_context(words[0], list(rest))
    found: dict[str, Any] = context.params
    return found


def _parts(path: Path) -> list[str]:
    """Commands of nsa-tune in comments and shell lines, each on one line."""
    text = re.sub(r"\\\n#?\s*", " ", path.read_text())
    return re.findall(r"(?<![\w-])(?:/[\w/.-]+/)?nsa-tune (?:serve|worker|token)[^\n`&|]*", text)


def _unit(path: Path) -> configparser.ConfigParser:
    found = configparser.ConfigParser(strict=True, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(path.read_text())
    return found


def test_there_is_one_of_each() -> None:
    assert [path.name for path in sorted(DEPLOY.iterdir())] == [
        "Containerfile", "kubernetes.yaml", "licences.txt", "nsa-tune-serve.service",
        "nsa-tune-worker.service", "serve.lock", "worker.sbatch",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [["nsa-tune", "sing"], ["nsa-tune", "serve", "--loudly"]])
def test_a_command_that_does_not_exist_would_be_found(words: list[str]) -> None:
    with pytest.raises(Exception, match=words[-1]):
        _check_command(words)


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_every_command_is_one_that_exists(path: Path) -> None:
    found = _parts(path)
    for line in found:
        # What the shell would put there is a word like any other.
        words = shlex.split(re.sub(r"\$\(\w+\)|\$\{[^}]*\}+", "x", line).replace("}", ""))
        _check_command(words)
    assert found or path.name in ("Containerfile", "licences.txt", "serve.lock")


@pytest.mark.parametrize("path", sorted(DEPLOY.iterdir()), ids=lambda path: path.name)
def test_every_variable_is_one_that_nsa_tune_reads(path: Path) -> None:
    sources = "".join(one.read_text() for one in (ROOT / "nsa_tune").rglob("*.py"))
    own = set(re.findall(r"\{(NSA_TUNE_\w+):-", path.read_text()))
    for name in set(re.findall(r"NSA_TUNE_\w+", path.read_text())) - own:
        assert f'"{name}"' in sources, name


# --- systemd


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_can_be_read_and_starts_a_command(path: Path) -> None:
    unit = _unit(path)
    assert unit.sections() == ["Unit", "Service", "Install"]
    service = unit["Service"]
    options = _check_command(shlex.split(service["ExecStart"]))
    state = f"/var/lib/{service['StateDirectory']}/"
    assert str(options["database"]).startswith(state), "ProtectSystem leaves that writable"
    assert service["User"] != "root"
    assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_systemd_understands_a_unit(path: Path, tmp_path: Path) -> None:
    # The command is not installed where tests run.
    text = re.sub("^ExecStart=\\S+", "ExecStart=/bin/true", path.read_text(), flags=re.MULTILINE)
    (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / path.name)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert path.name not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_is_exposed_little(path: Path) -> None:
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(path)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-200:]


def test_a_workers_unit_reaches_the_gpus_and_its_token_is_in_no_environment() -> None:
    service = _unit(DEPLOY / "nsa-tune-worker.service")["Service"]
    assert service["DeviceAllow"] == "char-nvidia* rw"
    assert "PrivateDevices" not in service
    assert "MemoryDenyWriteExecute" not in service, "kernels are compiled"
    assert "NSA_TUNE_TOKEN=" not in (DEPLOY / "nsa-tune-worker.service").read_text()


# --- Slurm


def test_the_batch_script_is_one() -> None:
    path = DEPLOY / "worker.sbatch"
    text = path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)
    assert text.startswith("#!/bin/bash\n")
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert options
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in options)
    # sbatch reads no options behind the first command.
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")


# --- Kubernetes


def _node(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in NODES if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def _pod(node: dict[str, Any]) -> dict[str, Any]:
    spec = node["spec"]
    if node["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def test_every_object_says_what_it_is() -> None:
    kinds = {
        "PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "Service": "v1",
        "NetworkPolicy": "networking.k8s.io/v1",
        "PriorityClass": "scheduling.k8s.io/v1", "CronJob": "batch/v1",
    }  # fmt: skip
    assert {one["kind"]: one["apiVersion"] for one in NODES} == kinds
    assert all(re.fullmatch("[a-z0-9-]+", one["metadata"]["name"]) for one in NODES)


@pytest.mark.parametrize("kind", ["Deployment", "CronJob"])
def test_a_pod_runs_a_command_and_mounts_what_there_is(kind: str) -> None:
    (node,) = [one for one in NODES if one["kind"] == kind]
    pod = _pod(node)
    (container,) = pod["containers"]
    options = _check_command(["nsa-tune", *container["args"]])
    mounts = [one["mountPath"] for one in container["volumeMounts"]]
    assert str(options["database"].parent) in mounts, "the rest is read-only, or lost"
    volumes = {one["name"] for one in pod["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert container["image"] in (DEPLOY / "Containerfile").read_text()


@pytest.mark.parametrize("kind", ["Deployment", "CronJob"])
def test_a_pod_has_limits_and_no_rights(kind: str) -> None:
    (node,) = [one for one in NODES if one["kind"] == kind]
    pod = _pod(node)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
    temporary = [one["emptyDir"] for one in pod["volumes"] if "emptyDir" in one]
    assert all("sizeLimit" in one for one in temporary)


def test_the_objects_fit_each_other() -> None:
    serve, service = _node("Deployment", "nsa-tune"), _node("Service", "nsa-tune")
    (container,) = _pod(serve)["containers"]
    options = _check_command(["nsa-tune", *container["args"]])
    (port,) = container["ports"]
    assert options["port"] == port["containerPort"]
    assert service["spec"]["selector"] == serve["spec"]["template"]["metadata"]["labels"]
    assert serve["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    claims = [one["persistentVolumeClaim"]["claimName"] for one in _pod(serve)["volumes"]
              if "persistentVolumeClaim" in one]  # fmt: skip
    for claim in claims:
        _node("PersistentVolumeClaim", claim)
    worker = _pod(_node("CronJob", "nsa-tune-worker"))
    _node("PriorityClass", worker["priorityClassName"])
    address = {one["name"]: one.get("value") for one in worker["containers"][0]["env"]}
    port_there = service["spec"]["ports"][0]["port"]
    assert address["NSA_TUNE_SERVICE"] == f"http://{service['metadata']['name']}:{port_there}"


def test_probes_ask_what_the_service_answers() -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("prometheus_client")
    (container,) = _pod(_node("Deployment", "nsa-tune"))["containers"]
    from nsa_tune.fleet.service.http import application

    routed = Path(application.__file__).read_text()
    for name in ("readinessProbe", "livenessProbe"):
        assert f'"{container[name]["httpGet"]["path"]}"' in routed


# --- containers


def _instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / "Containerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_images_are_built_from_what_is_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stages = []
    for name, words in _instructions():
        assert name in INSTRUCTIONS
        if name == "FROM":
            stages.append(words.rpartition(" ")[2])
        if name == "COPY":
            sources = [word for word in words.split()[:-1] if word != "--from=build"]
            assert all((ROOT / source).exists() for source in sources if source != "/venv")
        if name == "RUN":
            for extras in re.findall(r"/source\[([\w,]+)\]", words):
                assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert stages == ["build", "serve", "worker"]


def test_images_run_as_nobody_and_have_what_is_locked() -> None:
    users = [words for name, words in _instructions() if name == "USER"]
    assert users == ["10001", "10001"]
    installed = [words for _, words in _instructions() if "serve.lock" in words and "pip" in words]
    assert all("--require-hashes" in words for words in installed)
    assert installed
    lock = (DEPLOY / "serve.lock").read_text()
    names = re.findall(r"^([a-z0-9-]+)==(\S+)", lock, re.MULTILINE)
    licences = (DEPLOY / "licences.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in licences] == [f"{a} {b}" for a, b in names]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["serve"], *extras["report"]]
    assert {re.split("[<>=;]", text)[0] for text in needed} <= dict(names).keys()
    pinned = (ROOT / "constraints.txt").read_text()
    assert all(f"{a}=={b}" in pinned for a, b in names if f"\n{a}==" in pinned)


def test_images_run_commands() -> None:
    entry: list[str] = []
    ran = []
    for name, words in _instructions():
        if name == "ENTRYPOINT":
            entry = json.loads(words)
        if name == "CMD":
            ran.append(_check_command([*entry, *json.loads(words)]))
    assert len(ran) == 2
    exposed = [int(words) for name, words in _instructions() if name == "EXPOSE"]
    assert exposed == [ran[0]["port"]]
