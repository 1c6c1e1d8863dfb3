"""The files of `deploy/`, as far as they can be checked without Docker, a cluster, or systemd as the first process.

hadolint reads the Dockerfiles, Kubernetes' schemas the manifests, systemd's own tools the units. Every command in them is read
by the program that it calls.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer
import yaml

from coordinator import __main__ as coordinator
from node import __main__ as node
from protos.errors import DivergedError, OperatorError, RefusedError
from protos.process import EXIT_INTERRUPTED

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
MANIFESTS = [file for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")) if file.name != "kustomization.yaml"]
EXPOSURE_MAX = 4.0
PROGRAMS = {"swarmentum": node.app, "swarmentum-coordinator": coordinator.app}

pytestmark = [pytest.mark.interop]


def read_by(program: str, words: list[str]) -> dict[str, Any]:
    """The settings that a command line means. Fails for an unknown command or option, as the program itself would."""
    group: Any = typer.main.get_command(PROGRAMS[program])
    name, command, rest = group.resolve_command(group.make_context(program, list(words), resilient_parsing=True), words)
    params: dict[str, Any] = command.make_context(name, rest).params
    return params


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


def commands_in(text: str) -> list[list[str]]:
    """Calls of our programs in a shell line."""
    found = re.findall(r"(swarmentum(?:-coordinator)? [a-z].*)$", text, flags=re.M)
    return [shlex.split(line.replace("$(", "").replace(")", "")) for line in found]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_dockerfiles(file: Path) -> None:
    program = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, file], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    text = file.read_text()
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, flags=re.M):
        assert all((ROOT / name).exists() for name in line.split()), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= extras.keys()
    assert re.search(r"^USER 10001$", text, flags=re.M), "it runs as root"


def test_hadolint_finds_mistakes(tmp_path: Path) -> None:
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /src\n")
    program = Path(sys.executable).with_name("hadolint")
    assert subprocess.run([program, wrong], capture_output=True, check=False, timeout=300).returncode == 1


def test_the_coordinator_s_image_has_no_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = " ".join([*extras["dependencies"], *extras["optional-dependencies"]["postgres"]])
    assert not re.search(r"torch|hivemind|transformers|numba", needed)
    assert "'.[postgres]'" in (DEPLOY / "docker" / "coordinator.Dockerfile").read_text()


def test_commands_of_the_images_and_of_compose_are_those_of_the_programs() -> None:
    [compose] = documents(DEPLOY / "docker" / "compose.yml")
    ours = {
        "coordinator": "swarmentum-coordinator",
        "relay": "swarmentum",
        "peer-one": "swarmentum",
        "peer-two": "swarmentum",
    }
    for name, program in ours.items():
        words = [re.sub(r"\$\{[^}]*\}", "swarm.example:7700", word) for word in compose["services"][name]["command"]]
        assert read_by(program, words)["as_json"] is True
    text = (DEPLOY / "docker" / "coordinator.Dockerfile").read_text()
    serve, probe = (
        [str(word) for word in yaml.safe_load(re.search(pattern, text, flags=re.M)[1])]  # type: ignore[index]
        for pattern in (r"^CMD (.*)$", r"^HEALTHCHECK .*CMD (.*)$")
    )
    assert read_by("swarmentum-coordinator", serve)["metrics_listen"] == "0.0.0.0:9100"
    assert read_by(probe[0], probe[1:])["live"] is True


def test_services_of_compose_are_hardened_and_watched() -> None:
    [compose] = documents(DEPLOY / "docker" / "compose.yml")
    named = set(compose["volumes"])
    for name, service in compose["services"].items():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in named or (volume.endswith(":ro") and (DEPLOY / "docker" / source).exists()), volume
        if name == "coordinator":  # its image has a health check of its own
            assert "HEALTHCHECK" in (DEPLOY / "docker" / "coordinator.Dockerfile").read_text()
            continue
        kind, program, *words = service["healthcheck"]["test"]
        assert kind == "CMD"
        if program == "swarmentum":
            assert read_by(program, words)["as_json"] is True
        elif program == "python":
            compile(words[1], name, "exec")
        else:
            port = service.get("ports", ["9090:9090"])[-1].rpartition(":")[2]
            assert f":{port}/" in words[-1]
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert [port for port in published if not port.startswith("127.0.0.1:")] == [
        "7700:7700",
        "4001:4001/tcp",
        "4001:4001/udp",
    ]


def test_grafana_finds_its_prometheus_and_the_dashboard() -> None:
    [compose] = documents(DEPLOY / "docker" / "compose.yml")
    folder = DEPLOY / "monitoring" / "grafana"
    [source] = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert compose["services"]["prometheus"]["network_mode"] == f"service:{host}"
    assert port == "9090"
    [provider] = yaml.safe_load((folder / "dashboards" / "swarmentum.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    assert any(path.startswith(provider["options"]["path"] + "/") for path in mounted)


def test_kustomize_renders_the_base_and_kubernetes_takes_what_it_renders() -> None:
    tool = next((words for words in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(words[0])), None)
    if tool is None:
        pytest.skip("no kustomize and no kubectl here")
    done = subprocess.run([*tool, str(DEPLOY / "kubernetes")], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rendered = [document for document in yaml.safe_load_all(done.stdout) if document]
    assert len(rendered) == sum(len(documents(file)) for file in MANIFESTS)
    for document in rendered:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
        assert document["metadata"]["labels"]["app.kubernetes.io/part-of"] == "swarmentum"
    [pods] = [
        it for it in rendered if it["metadata"]["name"] == "swarmentum-coordinator" and it["kind"] == "StatefulSet"
    ]
    spec = pods["spec"]["template"]["spec"]
    images = {it["image"] for it in (*spec["containers"], *spec["initContainers"])}
    assert images == {"registry.example/swarmentum-coordinator:0.1.0"}


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: file.stem)
def test_kubernetes_takes_the_manifests(file: Path) -> None:
    for document in documents(file):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    wrong = documents(file)[-1] | {"kind": "StatefulSet", "apiVersion": "apps/v1", "spec": {"replicas": "two"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_manifests_fit_together() -> None:
    [kustomization] = documents(DEPLOY / "kubernetes" / "kustomization.yaml")
    assert sorted(kustomization["resources"]) == [file.name for file in MANIFESTS]
    found = {(it["kind"], it["metadata"]["name"]): it for file in MANIFESTS for it in documents(file)}
    pods = found["StatefulSet", "swarmentum-coordinator"]["spec"]
    names = [f"swarmentum-coordinator-{number}" for number in range(pods["replicas"])]
    assert sorted(found["ConfigMap", "swarmentum-addresses"]["data"]) == names
    for name in names:
        assert found["Service", name]["spec"]["selector"] == {"statefulset.kubernetes.io/pod-name": name}
    container = pods["template"]["spec"]["containers"][0]
    [serve] = commands_in(container["command"][-1])
    assert read_by(serve[0], serve[1:])["as_json"] is True
    for probe in ("startupProbe", "livenessProbe"):
        words = container[probe]["exec"]["command"]
        assert read_by(words[0], words[1:])["live"] is True


PEER_FILES = DEPLOY / "peers"
TASK = {"name", "workdir", "envs", "secrets", "resources", "file_mounts", "setup", "run"}
RESOURCES = {"accelerators", "use_spot", "disk_size"}
"""Keys of a SkyPilot task that the file uses; the schemas of SkyPilot 0.14.1 took it."""


def joins(words: list[str]) -> dict[str, Any]:
    """The settings of a peer's command line, which has to agree to downloads itself and to name its home."""
    found = read_by(words[0], words[1:])
    assert found["yes"] is True
    assert found["home"] is not None
    return found


def test_the_job_of_peers_is_one_that_kubernetes_takes_and_a_preempted_peer_starts_again() -> None:
    volume, job = documents(PEER_FILES / "kubernetes-job.yaml")
    for document in (volume, job):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    found = joins(["swarmentum", *container["args"]])
    mounts = {it["name"]: it for it in container["volumeMounts"]}
    assert mounts["homes"]["subPathExpr"] == f"peer-$({container['env'][0]['name']})", (
        "each peer has a folder of its own"
    )
    assert Path(found["home"]).is_relative_to(mounts["homes"]["mountPath"])
    assert Path(found["invite_file"]).is_relative_to(mounts["link"]["mountPath"])
    assert {it["name"] for it in pod["volumes"]} == mounts.keys()
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == volume["metadata"]["name"]
    rules = {code: rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"] for code in
             rule.get("onExitCodes", {"values": ["disruption"]})["values"]}  # fmt: skip
    errors = (OperatorError, RefusedError, DivergedError)
    ends = {error.exit_code: "FailIndex" for error in errors}
    assert rules == {"disruption": "Ignore", EXIT_INTERRUPTED: "Ignore", **ends}
    assert pod["restartPolicy"] == "Never", "podFailurePolicy needs it"


def test_the_slurm_script() -> None:
    file = PEER_FILES / "slurm.sh"
    tool = Path(sys.executable).with_name("shellcheck")
    checks = [["bash", "-n"], *([[str(tool)]] if tool.exists() else [])]
    for words in checks:
        done = subprocess.run([*words, file], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
    text = file.read_text()
    [line] = re.findall(r"^exec srun (.*)$", text, flags=re.M)
    assert joins(shlex.split(line.replace("${SLURM_CPUS_PER_TASK:-4}", "4")))["threads"] == "4"
    before, _, after = text.partition("\nset -euo pipefail\n")
    assert "#SBATCH" in before
    assert "#SBATCH" not in after, "Slurm reads none after the first command"


def test_the_task_for_skypilot() -> None:
    [task] = documents(PEER_FILES / "skypilot.yaml")
    assert task.keys() <= TASK
    assert task["resources"].keys() <= RESOURCES
    assert task["secrets"] == {"LINK": None}, "without a value SkyPilot asks for --secret LINK"
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True, timeout=300)
    [line] = re.findall(r"^exec \.venv/bin/(.*)$", task["run"], flags=re.M)
    joins(shlex.split(line))
    assert all(f'"{mount}/' in task["run"] for mount in task["file_mounts"])


def test_the_line_for_a_rented_card() -> None:
    [line] = re.findall(r"^printf .*\| docker run (.*)$", (ROOT / "docs" / "operating.md").read_text(), flags=re.M)
    words = shlex.split(line)
    options, command = words[: words.index("swarmentum-node")], words[words.index("swarmentum-node") + 1 :]
    found = joins(["swarmentum", *command])
    volume = options[options.index("--volume") + 1].partition(":")[2]
    assert Path(found["home"]).is_relative_to(volume)
    assert f"VOLUME {volume}" in (DEPLOY / "docker" / "node.Dockerfile").read_text()
    assert {"--interactive", "--gpus"} <= set(options), "the link comes from stdin"


def test_the_routes_of_port_443_are_a_unit() -> None:
    """tests/system/test_port443.py runs its commands."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here")
    file = DEPLOY / "proxy" / "swarmentum-port443.service"
    verify = subprocess.run([tool, "verify", file], capture_output=True, text=True, check=False, timeout=300)
    assert [found for found in (verify.stdout + verify.stderr).splitlines() if file.name in found] == []


@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.stem)
def test_units(file: Path, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze here")
    text = file.read_text()
    [line] = re.findall(r"^ExecStart=/opt/swarmentum/bin/(.*)$", text, flags=re.M)
    words = shlex.split(line)
    assert read_by(words[0], words[1:])["as_json"] is True
    copy = tmp_path / file.name
    copy.write_text(text.replace("/opt/swarmentum/bin", str(Path(sys.executable).parent)))
    verify = subprocess.run([tool, "verify", copy], capture_output=True, text=True, check=False, timeout=300)
    assert [found for found in (verify.stdout + verify.stderr).splitlines() if file.name in found] == []
    rated = subprocess.run(
        [tool, "security", "--offline=yes", copy], capture_output=True, text=True, check=False, timeout=300
    )
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", rated.stdout)
    assert exposure is not None, rated.stdout + rated.stderr
    assert float(exposure[1]) < EXPOSURE_MAX
