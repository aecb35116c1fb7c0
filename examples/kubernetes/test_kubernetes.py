"""The manifests in examples/kubernetes: valid, in agreement with each other, and their commands run as a pod runs them.

What a cluster does to the secret, to the root file system and to the user is done here as well, where there is root.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from rpcdataloader import launch, rpc_async
from tests.conftest import READY_LINE, TIMEOUT_SCALE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/kubernetes"
USER = 1000

pytestmark = pytest.mark.usefixtures("clean_client")


def documents(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


SERVICE, STATEFUL_SET, BUDGET = documents("workers.yaml")
(POLICY,) = documents("network-policy.yaml")
(JOB,) = documents("trainer.yaml")
AUTOSCALER, METRICS, EXPORTER = documents("autoscaler.yaml")
POD, TRAINER, WATCHER = (document["spec"]["template"]["spec"] for document in (STATEFUL_SET, JOB, EXPORTER))
(SERVER,) = POD["containers"]


# --- what they say


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_manifests_are_valid(version):
    validator = pytest.importorskip("kubernetes_validate")
    for manifest in SERVICE, STATEFUL_SET, BUDGET, POLICY, JOB, AUTOSCALER, METRICS, EXPORTER:
        validator.validate(manifest, version, strict=True)
    wrong = {**SERVICE, "spec": {**SERVICE["spec"], "clusterIPP": "None"}}
    with pytest.raises(validator.ValidationError, match="clusterIPP"):
        validator.validate(wrong, version, strict=True)


def test_manifests_agree_with_each_other():
    labels = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels
    assert STATEFUL_SET["spec"]["selector"]["matchLabels"] == labels
    assert BUDGET["spec"]["selector"]["matchLabels"] == labels
    assert POLICY["spec"]["podSelector"]["matchLabels"] == labels
    (rule,) = POLICY["spec"]["ingress"]
    assert rule["from"] == [
        {"podSelector": {"matchLabels": document["spec"]["template"]["metadata"]["labels"]}}
        for document in (JOB, EXPORTER)
    ]
    assert STATEFUL_SET["spec"]["serviceName"] == SERVICE["metadata"]["name"]
    ports = {rule["ports"][0]["port"], SERVICE["spec"]["ports"][0]["port"], SERVER["ports"][0]["containerPort"]}
    assert ports == {settings().port} == {6543}
    (kustomization,) = documents("kustomization.yaml")
    assert all((FOLDER / name).exists() for name in kustomization["resources"])
    (secret,) = kustomization["secretGenerator"]
    for pod in POD, TRAINER, WATCHER:
        assert pod["volumes"][0]["secret"]["secretName"] == secret["name"]
        assert {part["image"] for part in pod["initContainers"] + pod["containers"]} == {"your-image"}
        for part in pod["initContainers"] + pod["containers"]:
            assert part["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {mount["name"] for mount in part["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}


def settings():
    options = launch.make_parser().parse_args(SERVER["args"])
    options.port = int(options.port)
    return options


def test_pod_has_time_to_drain():
    assert settings().grace + 10 <= POD["terminationGracePeriodSeconds"]
    liveness = SERVER["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > POD["terminationGracePeriodSeconds"]


# --- what they do


def as_user(*command):
    """A command as the user of the pods, in the group that owns the volumes, with none of root's rights."""
    drop = [f"--groups={USER}", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", *drop, *command]


@pytest.fixture(scope="session")
def mounts():
    """Where the volumes of the pod are: the secret as kubelet leaves it for a pod with an fsGroup."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    done = subprocess.run(
        as_user(sys.executable, "-c", "import rpcdataloader"), capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"another user cannot run Python here: {done.stderr.strip()}")
    # Folders of pytest are closed to other users.
    with tempfile.TemporaryDirectory(prefix="rpcdataloader-pod-") as name:
        Path(name).chmod(0o755)
        yield make_volumes(Path(name))


def make_volumes(folder):
    secret, own = folder / "secret", folder / "own"
    version = secret / "..2026_01_01_00_00_00.123"
    version.mkdir(parents=True)
    (version / "token").write_text("the secret of a cluster 0123456789\n")
    (version / "token").chmod(0o440)  # 0400 of the manifest, and what lets the group read it
    for path in secret, version, version / "token":
        os.chown(path, 0, USER)
    (secret / "..data").symlink_to(version.name)
    (secret / "token").symlink_to("..data/token")
    own.mkdir()
    own.chmod(0o2777)
    os.chown(own, 0, USER)
    return {"/etc/rpcdataloader": str(secret), "/run/rpcdataloader": str(own)}


def here(words, mounts):
    """What a manifest says, with the paths of this machine."""
    text = "\0".join(map(str, words))
    for path, place in mounts.items():
        text = text.replace(path, place)
    text = text.replace("$(POD_NAME).workers.$(POD_NAMESPACE).svc.cluster.local", "localhost")
    return [sys.executable if word == "python" else word for word in text.split("\0")]


def load_as_user(path):
    script = (
        "import sys; from rpcdataloader.wire.credentials import load_credentials as load; load(token_file=sys.argv[1])"
    )
    return subprocess.run(
        as_user(sys.executable, "-c", script, path),
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("pod", [POD, TRAINER], ids=["workers", "trainer"])
def test_secret_is_refused_as_it_is_mounted_and_taken_as_the_init_container_copies_it(pod, mounts):
    mounted, own = (f"{place}/token" for place in mounts.values())
    refused = load_as_user(mounted)
    assert refused.returncode
    assert "is open to other users (mode 0440)" in refused.stderr
    copy_secret(pod, mounts)
    taken = load_as_user(own)
    assert taken.returncode == 0, taken.stderr


def copy_secret(pod, mounts):
    """What the init container does."""
    (container,) = pod["initContainers"]
    subprocess.run(as_user(*here(container["command"], mounts)), check=True)


@pytest.mark.skipif(
    any(Path(place).is_relative_to("/tmp") for place in (ROOT, sys.prefix)), reason="the container has another /tmp"
)
def test_container_serves_without_rights_and_without_a_place_to_write_and_drains(mounts, monkeypatch, tmp_path):
    copy_secret(POD, mounts)
    env = {
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "RPCDATALOADER_TOKEN_FILE": "/mnt/token",
        "HOME": "/tmp",
    }
    words = here([*SERVER["command"], *SERVER["args"], "--port=0", "--num-workers=2"], mounts)
    # /tmp is the one place to write; the secret is put where it can be seen when /tmp is another one.
    script = (
        f"mount --bind {mounts['/run/rpcdataloader']} /mnt && mount -t tmpfs none /tmp && chmod 1777 /tmp && "
        'mount -t tmpfs -o ro none /dev/shm && mount -o remount,bind,ro / && exec "$@"'
    )
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script, "sh", *as_user(*words)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=env,
            cwd="/",
        )
    with process.stdout:
        try:
            match = READY_LINE.fullmatch(process.stdout.readline())
            if not match:
                message = (tmp_path / "log").read_text()
                if "mount: " in message or "unshare: " in message:
                    pytest.skip(f"namespaces of mounts are not allowed here: {message}")
                raise AssertionError(message)
            host, _, port = match[1].rpartition(":")
            assert host == "localhost"
            own = tmp_path / "token"
            own.touch(0o600)
            own.write_text(Path(mounts["/run/rpcdataloader"], "token").read_text())
            monkeypatch.setenv("RPCDATALOADER_TOKEN_FILE", str(own))
            uid, can_write = rpc_async(f"localhost:{port}", look_around).wait()
            assert (uid, can_write) == (USER, {"/tmp": True, "/": False, "/dev/shm": False, "/var/tmp": False})
            assert probe(port) == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(20 * TIMEOUT_SCALE) == 0
            assert probe(port) == 1
        finally:
            process.kill()
            process.wait()


def look_around():
    return os.getuid(), {path: os.access(path, os.W_OK) for path in ("/tmp", "/", "/dev/shm", "/var/tmp")}


def probe(port):
    """Exit status of the readiness probe."""
    command = here(SERVER["readinessProbe"]["exec"]["command"], {"127.0.0.1:6543": f"127.0.0.1:{port}"})
    if importlib.util.find_spec("rpcdataloader.status") is None:
        pytest.skip("there is no rpcdataloader.status to probe with")
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False).returncode
