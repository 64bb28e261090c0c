"""Downloads against a real server on this machine: resume, checksum, broken connections, no server at all."""

import http.server
import threading

import pytest
from episodes import flat, make_episodes, write_d4rl

from refplan.data import download as downloads
from refplan.data.download import checksum_file, download, fetch_d4rl
from refplan.data.sources import load
from refplan.errors import RefplanError
from refplan.files import sha256


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one file, with ranges; the test says how it misbehaves."""

    def do_GET(self):
        server = self.server
        server.asked.append(self.headers.get("Range"))
        if self.path != "/hopper_medium-v2.hdf5":
            return self.send_error(404)
        begin = 0
        wanted = self.headers.get("Range")
        if wanted and server.ranges and self.headers.get("If-Range") == server.etag:
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            if begin >= len(server.content):
                return self.send_error(416)
        self.send_response(206 if begin else 200)
        self.send_header("ETag", server.etag)
        self.send_header("Content-Length", str(len(server.content) - begin))
        self.end_headers()
        stop = server.breaks.pop(0) if server.breaks else len(server.content)
        self.wfile.write(server.content[begin : max(begin, stop)])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "none"))
    write_d4rl(tmp_path / "source.hdf5", flat(make_episodes()))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.content, server.etag = (tmp_path / "source.hdf5").read_bytes(), '"one"'
    server.asked, server.breaks, server.ranges = [], [], True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("REFPLAN_D4RL_URL", f"http://127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def url(server):
    return f"http://127.0.0.1:{server.server_port}/hopper_medium-v2.hdf5"


def no_progress(received, total):
    pass


def test_a_d4rl_name_is_downloaded_once_and_loaded(server):
    data = load("hopper-medium-v2")
    assert data.lengths.tolist() == [5, 3, 7, 4] and data.meta.name == "hopper-medium-v2"
    load("hopper-medium-v2")
    assert len(server.asked) == 1
    path = fetch_d4rl("hopper-medium-v2")
    assert checksum_file(path).read_text().strip() == data.meta.checksum == sha256(path)
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, checksum_file(path).name]


def test_progress_is_told_from_first_to_last_byte(server, tmp_path):
    told = []
    download(url(server), tmp_path / "x.hdf5", lambda received, total: told.append((received, total)))
    assert told[0] == (0, len(server.content)) and told[-1] == (len(server.content),) * 2
    assert told == sorted(told)


def test_broken_connections_are_resumed_where_they_stopped(server, tmp_path):
    server.breaks = [1000, 3000]
    download(url(server), tmp_path / "x.hdf5", no_progress)
    assert (tmp_path / "x.hdf5").read_bytes() == server.content
    assert server.asked == [None, "bytes=1000-", "bytes=3000-"]


def test_a_part_left_by_a_killed_process_is_resumed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "ATTEMPTS", 1)
    server.breaks = [2000]
    with pytest.raises(OSError):
        download(url(server), tmp_path / "x.hdf5", no_progress)
    assert (tmp_path / "x.hdf5.part").stat().st_size == 2000 and not (tmp_path / "x.hdf5").exists()
    download(url(server), tmp_path / "x.hdf5", no_progress)
    assert server.asked == [None, "bytes=2000-"] and (tmp_path / "x.hdf5").read_bytes() == server.content


@pytest.mark.parametrize("ranges", [True, False])
def test_a_part_of_another_version_or_a_server_without_ranges_starts_anew(server, tmp_path, ranges):
    server.breaks, server.ranges = [2000], ranges
    (tmp_path / "x.hdf5.part").write_bytes(b"old" * 700)
    (tmp_path / "x.hdf5.part.etag").write_text('"another"')
    download(url(server), tmp_path / "x.hdf5", no_progress)
    assert (tmp_path / "x.hdf5").read_bytes() == server.content


def test_a_part_that_was_complete_already_is_fetched_again_safely(server, tmp_path):
    (tmp_path / "x.hdf5.part").write_bytes(server.content)
    (tmp_path / "x.hdf5.part.etag").write_text(server.etag)
    download(url(server), tmp_path / "x.hdf5", no_progress)
    assert (tmp_path / "x.hdf5").read_bytes() == server.content


def test_a_server_that_always_breaks_gives_a_clear_error_and_keeps_the_part(server, monkeypatch):
    server.breaks = [1000] * 99
    with pytest.raises(RefplanError, match=r"cannot be downloaded from .* put it at"):
        load("hopper-medium-v2")
    assert len(server.asked) == downloads.ATTEMPTS


def test_an_error_page_is_not_taken_for_data(server):
    server.content = b"<html>please log in</html>"
    with pytest.raises(RefplanError, match="not an HDF5 file"):
        load("hopper-medium-v2")
    server.content = b""
    with pytest.raises(RefplanError, match="not an HDF5 file"):
        load("hopper-medium-v2")


def test_a_missing_file_on_the_server_is_a_clear_error(server):
    with pytest.raises(RefplanError, match=r"'hopper-expert-v2' cannot be downloaded .*Not Found"):
        load("hopper-expert-v2")
    assert len(server.asked) == 1  # asking again would not help


def test_a_changed_file_is_noticed(server):
    load("hopper-medium-v2")
    path = fetch_d4rl("hopper-medium-v2")
    write_d4rl(path, flat(make_episodes(seed=1)))
    with pytest.raises(RefplanError, match="checksum is not the one recorded"):
        load("hopper-medium-v2")
    checksum_file(path).unlink()
    load("hopper-medium-v2")


def test_without_network_the_message_says_what_to_do(server, monkeypatch):
    monkeypatch.setenv("REFPLAN_D4RL_URL", "http://127.0.0.1:9")  # nothing listens there
    with pytest.raises(RefplanError, match=r"Connection refused.*put it at .*hopper_medium-v2\.hdf5"):
        load("hopper-medium-v2")
    monkeypatch.setenv("REFPLAN_OFFLINE", "1")
    with pytest.raises(RefplanError, match="REFPLAN_OFFLINE forbids"):
        load("hopper-medium-v2")
    assert server.asked == []


def test_files_of_the_d4rl_package_are_found(tmp_path, monkeypatch):
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path))
    write_d4rl(tmp_path / "walker2d_random-v2.hdf5", flat(make_episodes()))
    with pytest.raises(RefplanError, match="Walker2d-v5 has observations of size 17"):
        load("walker2d-random-v2")  # found and read; these toy rows are just not a walker's
