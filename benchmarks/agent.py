"""Everything that the agent must show: noise, exactness, checkpoints, faults, quality; on a GPU, what a step costs.

python benchmarks/agent.py [--quick] [--seed N] [--only noise,exact,...] [--gpu]

Each part is measured by a module of its own, `agent_PART.py`, which runs alone too. Without `--only`, `--quick` leaves
quality out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import importlib
import time
from collections.abc import Sequence
from typing import Any

from measure import finish

PARTS = ("noise", "exact", "checkpoint", "faults", "quality")
# Final quality says nothing within seconds; `--only quality --quick` runs a short form of it all the same.
QUICK = PARTS[:-1]
BASIC = (
    "noise_coverage", "exact_max_rel_diff_float64", "exact_max_rel_diff_float32", "noise_relative_width",
    "samples_lost", "samples_repeated", "checkpoint_pause_ratio", "kill_resume_failures",
)  # fmt: skip


def chosen_parts(text: str) -> tuple[str, ...]:
    """The parts named in a list with commas, in our order."""
    names = [name.strip() for name in text.split(",")]
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        raise argparse.ArgumentTypeError(f"no part is called {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    return tuple(part for part in PARTS if part in names)


def result_name(parts: Sequence[str]) -> str:
    """The file a full run is kept in: a run of some parts does not replace one of all."""
    return "agent" if tuple(parts) == PARTS else "_".join(("agent", *parts))


def run(part: str, quick: bool, seed: int) -> dict[str, Any]:
    """Measure one part, saying so."""
    print(f"== {part}", flush=True)
    began = time.perf_counter()
    result: dict[str, Any] = importlib.import_module(f"agent_{part}").measure(quick, seed)
    print(f"{part} took {time.perf_counter() - began:.0f} s", flush=True)
    return result


def gathered(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One flat object, the basic figures first; a part that says what another has said is an error of ours."""
    flat: dict[str, Any] = {}
    for part, result in results.items():
        # "seed" is said once for all.
        own = {key: value for key, value in result.items() if key != "seed"}
        twice = sorted(set(own) & set(flat))
        assert not twice, f"part {part} repeats {twice}"
        flat.update(own)
    return {**{key: flat[key] for key in BASIC if key in flat}, **flat}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="about a minute; a full run takes about an hour")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=chosen_parts, metavar="PARTS", help=",".join(PARTS))
    parser.add_argument("--gpu", action="store_true", help="step-time overhead on a GPU, and nothing else")
    arguments = parser.parse_args()
    if arguments.gpu:
        finish("agent_gpu", {**run("gpu", arguments.quick, arguments.seed), "seed": arguments.seed}, arguments.quick)
        return
    parts = arguments.only or (QUICK if arguments.quick else PARTS)
    results = {part: run(part, arguments.quick, arguments.seed) for part in parts}
    finish(result_name(parts), {**gathered(results), "seed": arguments.seed}, arguments.quick)


if __name__ == "__main__":
    main()
