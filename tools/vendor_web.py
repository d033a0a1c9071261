"""Fetch the JavaScript that the web page (uPlot) and its tests (axe-core) use, at fixed versions and checksums.

    python tools/vendor_web.py          uPlot into src/pollux/service/web/static/vendor
    python tools/vendor_web.py --axe    axe-core into tests/browser/vendor

Both are kept in git: nobody needs this to install, run or test Pollux, only to take a newer version. Packages are
fetched by npm, from wherever it is set up to.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Package:
    """A package of npm's: its SHA-512 as npm gives it, and which of its files go where."""

    name: str
    version: str
    sha512: str
    files: dict[str, str]
    folder: Path


UPLOT = Package(
    "uplot",
    "1.6.32",
    "KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
    {"dist/uPlot.esm.js": "uPlot.js", "dist/uPlot.min.css": "uPlot.css", "LICENSE": "LICENSE.txt"},
    ROOT / "src/pollux/service/web/static/vendor/uplot",
)
AXE = Package(
    "axe-core",
    "4.14.0",
    "9WTZxEjsZ7b13TH8JPmbV2z8CHbl80/2hm3XPEG4JgNdQLK81IBRXmSxHfMAOkSqQeRxT/0dwNDz2GOm3zzpcQ==",
    {"axe.min.js": "axe.min.js", "LICENSE": "LICENSE.txt"},
    ROOT / "tests/browser/vendor/axe",
)


def fetch(package: Package) -> None:
    """Have npm fetch it, check and unpack it; nothing is written where the checksum differs."""
    name = f"{package.name}@{package.version}"
    with tempfile.TemporaryDirectory() as folder:
        words = ["npm", "pack", "--silent", "--pack-destination", folder, name]
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            sys.exit(f"npm could not fetch {name}: {error}; install Node.js with npm")
        if done.returncode != 0:
            sys.exit(f"npm could not fetch {name}: {done.stderr.strip()}")
        [path] = Path(folder).glob("*.tgz")
        seen = base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()
        if seen != package.sha512:
            sys.exit(f"{name} has SHA-512 {seen}, not {package.sha512}: nothing was written")
        package.folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path) as files:
            for source, target in package.files.items():
                member = files.extractfile(f"package/{source}")
                if member is None:
                    sys.exit(f"{name} has no file {source}")
                (package.folder / target).write_bytes(member.read())
    (package.folder / "VERSION.txt").write_text(f"{package.name} {package.version}\nsha512-{seen}\n")


def main() -> None:
    """Fetch what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axe", action="store_true", help="axe-core, for the tests")
    fetch(AXE if parser.parse_args().axe else UPLOT)


if __name__ == "__main__":
    main()
