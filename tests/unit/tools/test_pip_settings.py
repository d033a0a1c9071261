"""Packages go to .venv, whatever the settings of pip say; what they say of the rest counts."""

import os
import subprocess
import sys
from pathlib import Path

import pip

from pollux.testing.waiting import PATIENCE_SECONDS

ROOT = Path(__file__).parents[3]
ELSEWHERE = ("prefix", "root", "target", "user")


def test_settings_of_pip_send_no_package_elsewhere(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    (unset,) = (line.split()[1:] for line in makefile.splitlines() if line.startswith("unexport PYTHONHOME"))
    assert {f"PIP_{name.upper()}" for name in ELSEWHERE} <= set(unset)
    recipe = makefile.split("define install\n")[1].split("endef")[0]
    assert "\tcp tools/pip.conf .venv\n" in recipe.split("pip install")[0]

    settings = tmp_path / ".config" / "pip" / "pip.conf"
    settings.parent.mkdir(parents=True)
    lines = [f"{name} = /elsewhere\n" for name in ELSEWHERE]
    settings.write_text("".join(["[global]\n", *lines, "timeout = 77\n[install]\n", *lines]))
    venv = tmp_path / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    (venv / "pip.conf").write_text((ROOT / "tools" / "pip.conf").read_text())
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "XDG_"))}
    environ |= {"HOME": str(tmp_path), "PYTHONPATH": str(Path(pip.__file__).parents[1])}
    words = [str(venv / "bin" / "python"), "-m", "pip", "config", "list"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True)
    said = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert said["global.timeout"] == "'77'"
    assert {said[f"{part}.{name}"] for part in ("global", "install") for name in ELSEWHERE} == {"''"}
