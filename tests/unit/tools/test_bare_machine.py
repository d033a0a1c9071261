"""What the script that makes a bare machine says and carries in, without a machine."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "tools" / "bare_machine.sh"
WORDS = ("bash", "cat", "cp", "dirname", "grep", "head", "mkdir", "sort")


@pytest.fixture
def host(tmp_path):
    """Programs of a host that is no Debian; root's, as the script is told."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for word in WORDS:
        (folder / word).symlink_to(shutil.which(word))
    for name, text in {"id": "echo 0", "debootstrap": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def test_without_a_debian_archive_one_line_says_what_to_give(host, tmp_path):
    words = [shutil.which("bash"), str(SCRIPT), "--dir", str(tmp_path / "bare")]
    for apt in ("", "#!/bin/sh\necho 'E: not here' >&2\nexit 100\n"):
        if apt:
            (host / "apt-get").write_text(apt)
            (host / "apt-get").chmod(0o755)
        done = subprocess.run(words, env={"PATH": str(host)}, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert "--mirror" in done.stderr


def test_settings_of_apt_go_along_and_programs_of_the_host_do_not(host, tmp_path):
    settings = {
        "apt.conf.d/80proxy": 'Acquire::http::Proxy "http://proxy:3128";\n',
        "apt.conf.d/81check": 'Acquire::Check-Valid-Until "false";\n',
        "apt.conf.d/90clean": 'APT::Keep-Downloaded-Packages "false";\n',
        "apt.conf.d/91runs": 'Acquire::http::Proxy-Auto-Detect "/usr/bin/here";\n',
        "apt.conf.d/92runs": 'Acquire::Retries "3";\nAPT::Update::Post-Invoke { "rm /x"; };\n',
        "auth.conf.d/mirror.conf": "machine mirror login me password secret\n",
    }
    for name, text in settings.items():
        path = tmp_path / "etc" / "apt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    text = SCRIPT.read_text()
    function = "    carry_apt()" + text.split("    carry_apt()")[1].split("\n    }\n")[0] + "\n    }\n"
    function = function.replace(" /etc/apt", f" {tmp_path}/etc/apt")
    machine = tmp_path / "machine"
    words = [shutil.which("bash"), "-euo", "pipefail", "-c", f"{function}\ncarry_apt {machine}"]
    subprocess.run(words, env={"PATH": str(host)}, check=True)
    found = sorted(str(path.relative_to(machine / "etc/apt")) for path in machine.rglob("*") if path.is_file())
    assert found == ["apt.conf.d/80proxy", "apt.conf.d/81check", "auth.conf.d/mirror.conf"]
