import gzip
import io
import os
import tarfile

import pytest

from pollux.core.errors import InvalidInput, TooLarge
from pollux.storage import archive
from pollux.storage.archive import digest_of, pack, unpack


def write(folder, **files):
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        assert path.is_relative_to(folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def archive_of(*entries):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for entry, data in entries:
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(content.getvalue())


def test_a_folder_arrives_as_it_was(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    write(source, train="x = 1\n", lib__model="y = 2\n", lib__deep__empty="")
    (source / "train").chmod(0o755)
    target.mkdir()
    unpack(pack(source), target)
    assert names(target) == ["lib/deep/empty", "lib/model", "train"]
    assert (target / "lib/model").read_text() == "y = 2\n"
    assert os.access(target / "train", os.X_OK)
    assert not os.access(target / "lib/model", os.X_OK) or os.stat(target / "lib/model").st_mode & 0o111 == 0


def test_the_same_files_make_the_same_package(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write(one, a="1", b__c="2")
    write(two, b__c="2", a="1")
    os.utime(two / "a", (1, 1))
    assert pack(one) == pack(two)
    write(two, a="3")
    assert digest_of(pack(one)) != digest_of(pack(two))


def test_what_needs_not_travel_stays(tmp_path):
    write(tmp_path, train="1", data__big="2", sub__data__x="3", keep__big="4", model="5")
    write(tmp_path / ".git", config="6")
    write(tmp_path / "sub" / "__pycache__", x="7")
    (tmp_path / ".polluxignore").write_text("# much\n\ndata/\nkeep/b*\n")
    os.symlink(tmp_path / "train", tmp_path / "link")
    os.symlink(tmp_path / "keep", tmp_path / "folder-link")
    os.symlink(tmp_path / "nothing", tmp_path / "broken")
    target = tmp_path / "target-of-test"
    archive = pack(tmp_path)
    target.mkdir()
    unpack(archive, target)
    found = names(target)
    assert {"train", "link", "model", ".polluxignore"} <= set(found)
    assert not [name for name in found if "data" in name or ".git/" in name or "pycache" in name]
    assert not [name for name in found if name in ("keep/big", "broken") or name.startswith("folder-link")]


def test_too_much_is_said_with_a_remedy(tmp_path, monkeypatch):
    write(tmp_path, a="x" * 100, b="y")
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 50)
    with pytest.raises(TooLarge, match="polluxignore"):
        pack(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(archive, "MAX_FILES", 1)
    with pytest.raises(TooLarge):
        pack(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(archive, "MAX_PACKED_BYTES", 10)
    with pytest.raises(TooLarge):
        pack(tmp_path)


def link(kind, target):
    entry = tarfile.TarInfo("link")
    entry.type, entry.linkname = kind, target
    return entry


@pytest.mark.parametrize(
    "entry",
    [
        tarfile.TarInfo("/etc/evil"),
        tarfile.TarInfo("../evil"),
        tarfile.TarInfo("a/../../evil"),
        tarfile.TarInfo("."),
        link(tarfile.SYMTYPE, "/etc/passwd"),
        link(tarfile.LNKTYPE, "../evil"),
        link(tarfile.CHRTYPE, ""),
        link(tarfile.FIFOTYPE, ""),
    ],
    ids=["absolute", "above", "above-inside", "itself", "symlink", "hardlink", "device", "fifo"],
)
def test_nothing_leaves_the_folder(tmp_path, entry):
    inner = tmp_path / "inner"
    inner.mkdir()
    with pytest.raises(InvalidInput, match="package"):
        unpack(archive_of((tarfile.TarInfo("ok"), b"1"), (entry, b"")), inner)
    assert names(tmp_path) in (["inner/ok"], [])


def test_a_file_cannot_be_written_through_another(tmp_path):
    with pytest.raises(InvalidInput):
        unpack(archive_of((tarfile.TarInfo("a"), b"1"), (tarfile.TarInfo("a"), b"2")), tmp_path)
    with pytest.raises(InvalidInput):
        unpack(archive_of((tarfile.TarInfo("b"), b"1"), (tarfile.TarInfo("b/c"), b"2")), tmp_path)
    assert (tmp_path / "a").read_text() == "1"


def test_a_package_that_swells_is_stopped(tmp_path, monkeypatch):
    bomb = archive_of((tarfile.TarInfo("a"), b"0" * 100_000))
    monkeypatch.setattr(archive, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(TooLarge):
        unpack(bomb, tmp_path)
    monkeypatch.setattr(archive, "MAX_FILES", 1)
    with pytest.raises(TooLarge):
        unpack(gzip.compress(b"\0" * 100_000), tmp_path)


NO_PACKAGES = {"empty": b"", "text": b"no archive", "compressed": gzip.compress(b"no tar" * 200), "cut": None}


@pytest.mark.parametrize("archive", NO_PACKAGES.values(), ids=NO_PACKAGES.keys())
def test_what_is_no_package_is_refused(tmp_path, archive):
    if archive is None:
        archive = archive_of((tarfile.TarInfo("a"), b"1" * 5000))[:-20]
    with pytest.raises(InvalidInput):
        unpack(archive, tmp_path)
