"""Connection to clusters: an unreachable cluster, and the Ray client."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from flexq_bench.db import queries
from flexq_bench.db.engine import open_database
from flexq_bench.errors import InfrastructureError
from flexq_bench.fleet import RayWorkers, ray_actors, ray_cluster
from flexq_bench.fleet.ray_cluster import _keep_private, _token, ray_session


@pytest.mark.parametrize("form", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_unreachable_cluster_is_refused_at_once(form):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        address = form.format(other.getsockname()[1])

    with (
        pytest.raises(InfrastructureError, match="no Ray cluster at"),
        ray_session(address, gpus=0),
    ):
        pass


@pytest.mark.parametrize("address", ["ray://", "ray://localhost", "ray://localhost:x"])
def test_invalid_address_is_refused_at_once(address):
    with (
        pytest.raises(InfrastructureError, match="an address is ray://HOST:PORT"),
        ray_session(address, gpus=0),
    ):
        pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError(
                "Version mismatch: The cluster was started with:\n"
                "    Ray: 2.50.0\n    Python: 3.12.1\n"
                "This process on 10.0.0.1 was started with:\n"
                "    Ray: 2.60.0\n    Python: 3.11.7\n"
            ),
            r"Ray: 2\.50\.0 Python: 3\.12\.1 .* Ray: 2\.60\.0 Python: 3\.11\.7",
        ),
        (
            ConnectionAbortedError(
                "Initialization failure from server:\nTraceback (most recent call last):\n"
                '  File "x.py", line 1\nRuntimeError: no memory\n'
            ),
            r"start a process for this client \(RuntimeError: no memory\): see ray_client_server",
        ),
    ],
)
def test_errors_of_ray_are_explained_in_one_line(monkeypatch, error, told):
    import ray

    def fail(**options):
        raise error

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray_cluster, "_CLIENT_WAIT_S", 0.0)
    with (
        pytest.raises(InfrastructureError, match=told) as raised,
        ray_session("auto", gpus=None),
    ):
        pass

    assert "\n" not in str(raised.value)


def test_head_node_that_is_still_starting_is_waited_for(monkeypatch, caplog):
    import ray

    answers = [ConnectionAbortedError("Initialization failure from server:\nTimeoutError: a"), None]

    def join(**options):
        if answer := answers.pop(0):
            raise answer

    monkeypatch.setattr(ray, "init", join)
    monkeypatch.setattr(ray_cluster, "_CLIENT_PAUSE_S", 0.0)
    with ray_session("auto", gpus=None):
        assert answers == []

    assert "(TimeoutError: a): see ray_client_server" in caplog.text


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own pipes
def test_fleet_is_reached_through_the_ray_client(
    simulated, a_cluster_for_clients, add_node, tmp_path
):
    cluster, port = a_cluster_for_clients
    add_node(cluster, "A100", 2)
    path = tmp_path / "flexq.sqlite"
    command = (simulated.__file__, f"ray://127.0.0.1:{port}", str(path), "40", "0.05", "A100")

    subprocess.run((sys.executable, *command), check=True, timeout=120)

    with open_database(str(path)) as database, database.session() as session:
        [run] = queries.runs(session)
        assert (run.status, len(list(queries.run_records(session, run.uuid)))) == ("complete", 40)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own pipes
def test_devices_in_use_block_workers_until_they_are_free(
    simulated, a_cluster, add_node, monkeypatch
):
    import ray

    class Other:
        def started(self):
            pass

    monkeypatch.setattr(ray_actors, "_PROCESS_START_S", 0.0)
    add_node(a_cluster, "A100", 1)
    gpu = simulated.simulated_gpu(0.01)
    with RayWorkers(a_cluster.address, backend="cuda", seed=0, actor=gpu) as workers:
        other = ray.remote(num_gpus=1)(Other).remote()
        ray.get(other.started.remote())
        workers.poll(0.5)
        assert (workers.arriving, workers.blocked) == (1, 1)

        ray.kill(other)
        while workers.blocked:
            time.sleep(0.1)
        assert workers.arriving == 1
        while not (events := workers.poll(0.5)):
            pass

    assert [event.worker.gpu for event in events] == ["A100"]


@pytest.mark.parametrize(("mode", "set_"), [(None, {"RAY_AUTH_MODE": "token"}), ("token", {})])
def test_token_is_sent_to_clusters_that_may_require_it(monkeypatch, tmp_path, mode, set_):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert _token("auto") == {}

    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123")
    (tmp_path / ".ray" / "auth_token").chmod(0o644)
    _keep_private(tmp_path / ".ray" / "auth_token")
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert _token("auto") == set_
    assert _token("ray://head:10001") == set_
    assert _token("127.0.0.1:6379") == {}
