import contextlib
import gzip
import io
import os
import tarfile
import tracemalloc

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


def header(name, kind=tarfile.REGTYPE, size=0):
    entry = tarfile.TarInfo(name)
    entry.type, entry.size = kind, size
    return entry.tobuf(tarfile.GNU_FORMAT)


def filled(data):
    return data + b"\0" * (-len(data) % 512)


def extra(size=100, kind=tarfile.XHDTYPE):
    """A header that only describes the file behind it, of this many bytes."""
    return header("extra", kind, size) + filled(b"x" * size)


END = b"\0" * 1024


def deep(depth, name="x"):
    return "/".join([name] * depth)


PATHS = {
    "deep": deep(65),
    "deeper than Python can walk": deep(5000),
    "long": deep(40, "y" * 30),
    "a long name": "z" * 256,
    "a long name of few letters": "ü" * 128,
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_paths_that_cannot_be_walked_are_refused(tmp_path, path):
    for style in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        content = tarfile.TarInfo(path).tobuf(style) + END
        with pytest.raises(TooLarge, match="parts"):
            unpack(gzip.compress(content), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_longest_path_that_is_taken_arrives(tmp_path):
    for path in (deep(64, "a"), "/".join(["b" * 255] * 4)):
        unpack(gzip.compress(tarfile.TarInfo(path).tobuf(tarfile.PAX_FORMAT) + END), tmp_path)
        assert (tmp_path / path).is_file()


def test_what_would_not_be_unpacked_is_not_packed(tmp_path):
    write(tmp_path, **{"__".join(["d"] * 65): "1"})
    with pytest.raises(TooLarge, match="parts"):
        pack(tmp_path)


EXTRAS = {
    "a long header": extra(17 * 1024),
    "a header that claims to be long": header("x", tarfile.XHDTYPE, 2**33 - 1),
    "a long name": extra(17 * 1024, tarfile.GNUTYPE_LONGNAME),
    "a long link": header("x", tarfile.GNUTYPE_LONGLINK, 2**33 - 1),
    "an old long header": header("x", tarfile.SOLARIS_XHDTYPE, 2**33 - 1),
    "many headers": extra() * 2000,
    "many names": extra(kind=tarfile.GNUTYPE_LONGNAME) * 2000,
    "both in turn": (extra() + extra(kind=tarfile.GNUTYPE_LONGNAME)) * 2000,
    "for all files": header("x", tarfile.XGLTYPE, 100) + filled(b"x" * 100),
}


@pytest.mark.parametrize("content", EXTRAS.values(), ids=EXTRAS.keys())
def test_what_describes_a_file_is_bounded(tmp_path, content):
    """Each of these would be kept in memory, or read by a function that calls itself."""
    with pytest.raises(InvalidInput):
        unpack(gzip.compress(content + header("file") + END), tmp_path)
    assert not [*tmp_path.iterdir()]


def pax(**words):
    body = b"".join(
        next(line for n in range(1, 99) if len(line := f"{n} {key.replace('_', '.')}={value}\n".encode()) == n)
        for key, value in words.items()
    )
    return header("pax", tarfile.XHDTYPE, len(body)) + filled(body)


SIZES = {
    "less than nothing": pax(size="-4000"),
    "more than all": pax(size=str(2**60)),
    "no number": pax(size="1e400"),
    "holes": pax(GNU_sparse_major="1", GNU_sparse_minor="0", GNU_sparse_name="x", GNU_sparse_realsize="5"),
}


@pytest.mark.parametrize("extras", SIZES.values(), ids=SIZES.keys())
def test_a_size_that_is_none_takes_no_room(tmp_path, extras):
    content = extras + header("file", size=512) + b"0\n" + b"\0" * 510 + END
    with contextlib.suppress(InvalidInput):
        unpack(gzip.compress(content), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) <= 512


def test_folders_are_counted_as_files_are(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_FILES", 100)
    content = b"".join(header("/".join(f"{number}{letter}" for letter in "abcdefghij")) for number in range(50))
    with pytest.raises(TooLarge, match="folders"):
        unpack(gzip.compress(content + END), tmp_path)
    assert sum(path.is_dir() for path in tmp_path.rglob("*")) <= 120


def test_only_one_member_of_gzip_is_read(tmp_path):
    """Empty ones take twenty bytes and a lot of time each."""
    whole = gzip.compress(header("file") + END)
    unpack(whole + gzip.compress(b"") * 1000, tmp_path)
    assert names(tmp_path) == ["file"]
    with pytest.raises(InvalidInput):
        unpack(gzip.compress(b"") * 1000 + whole, tmp_path / "other")


def test_memory_does_not_grow_with_what_is_unpacked(tmp_path):
    """A bomb of 64 MiB in 64 KiB, and thousands of described files: the most that Python holds at once stays small."""
    large = header("large", size=64 << 20)
    many = b"".join(extra(8192) + header(f"small-{number}") for number in range(3000))
    bomb = tmp_path / "bomb"
    with gzip.open(bomb, "wb") as file:
        file.write(large)
        for _ in range(64):
            file.write(b"\0" * (1 << 20))
        file.write(many + END)
    target = tmp_path / "target"
    target.mkdir()
    with bounded_memory():
        unpack(bomb, target)
    assert (target / "large").stat().st_size == 64 << 20


@contextlib.contextmanager
def bounded_memory():
    tracemalloc.start()
    try:
        yield
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 8 << 20, most


KINDS = sorted({each for each in vars(tarfile).values() if isinstance(each, bytes) and len(each) == 1} | {b"?"})
RESTS = (
    b"1" * 512,
    b"9999999\n" + b"1\n" * 252,
    b"1\n" * 256,
    b"\n" * 512,
    b"9" * 511 + b"\n",
    b"\0" * 512,
    b"\xff" * 512,
)
SPARSE: tuple[dict[str, str], ...] = (
    {"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"},
    {"GNU.sparse.size": "1", "GNU.sparse.offset": "x"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1", "GNU.sparse.name": "x"},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
)


@pytest.mark.parametrize(("kind", "words"), [*((kind, {}) for kind in KINDS), *((b"0", words) for words in SPARSE)])
def test_no_kind_of_entry_is_read_without_bound(tmp_path, kind, words):
    """The rest of an entry looks like one that goes on for ever: numbers, and more of them in each next block."""
    sparse = bytearray(header("x", kind, size=1))
    sparse[386:495], sparse[148:156] = b"1" * 109, b" " * 8
    sparse[148:156] = b"%06o\0 " % sum(sparse)
    for rest in RESTS:
        blocks = rest + (rest[8:] + rest[8:16]) * (4 << 10)
        package = gzip.compress((pax(**words) if words else b"") + bytes(sparse) + blocks, 1)
        is_plain = not words and kind in tarfile.REGULAR_TYPES and kind != tarfile.GNUTYPE_SPARSE
        with bounded_memory(), contextlib.nullcontext() if is_plain else pytest.raises(InvalidInput):
            unpack(package, tmp_path)
        (tmp_path / "x").unlink(missing_ok=not is_plain)
