"""Where `mettle serve` says that it listens is where it listens."""

import re
import signal

import httpx
import pytest

from mettle.service.server import format_address
from tests.covering import mark_slow_except
from tests.processes import start_mettle
from tests.small_runs import small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("runs")).run


# How hosts are written is tried below; a server of each kind is started where there is time.
@pytest.mark.parametrize(
    ("host", "written"),
    mark_slow_except([("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost")], [("::1", "[::1]")]),
)
def test_the_address_that_is_told_can_be_asked(run, tmp_path, host, written):
    words = ["serve", run.folder, "--gallery", tmp_path / "g.mettle", "--create"]
    server = start_mettle(*words, "--threshold", "0.5", "--host", host, "--port", "0")
    try:
        said = server.stdout.readline()
        found = re.search(r": 0 people; (http://(.+):(\d+))/workbench\n$", said)
        assert found, said + (server.stderr.read() if server.poll() is not None else "")
        assert found[2] == written and int(found[3]) > 0
        with httpx.Client(timeout=120, trust_env=False, verify=False) as client:
            assert client.get(f"{found[1]}/v1/info").json()["threshold"] == 0.5
        server.send_signal(signal.SIGTERM)
        assert server.wait(120) == 0
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("::", "http://[::]:80"),
        ("match.example.org", "http://match.example.org:80"),
    ],
)
def test_an_address_is_written_as_clients_write_it(host, told):
    assert format_address(host, 80) == told
    assert httpx.URL(told).host == host.strip("[]")
