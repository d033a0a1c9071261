"""Six applications and a workload that need no files.

The parameters are made up: round numbers for a recent data-centre GPU, four to a node, on a fast network. State is that
of models of the kind: from 11 million (a small classifier) to 300 million parameters (a large vision model), 8 or 12
bytes each.
"""

from __future__ import annotations

from pollux.goodput import BatchLimits, FabricThroughput, PublishedThroughput
from pollux.sim.applications.application import Application
from pollux.sim.applications.modelled import ModelledApplication, NoiseSchedule
from pollux.sim.workloads.generate import GenerateSettings, generate_workload
from pollux.sim.workloads.workload import Workload

__all__ = ["builtin_applications", "builtin_workload"]


def builtin_applications() -> dict[str, Application]:
    """Applications by name, from minutes to days of one GPU."""
    applications = (
        # A recommender: wide embeddings and little arithmetic, so that it is not worth a second node.
        ModelledApplication(
            name="recsys", epochs=10, steps_per_epoch=12_000, state_bytes=2.4e9,
            throughput=PublishedThroughput(
                alpha_c=0.006, beta_c=1.5e-6, alpha_n=0.12, beta_n=0.004, alpha_r=0.012, beta_r=0.001, gamma=1.5
            ),
            noise=NoiseSchedule(start=8_000, end=60_000),
            limits=BatchLimits(initial=2_048, maximum=65_536, local_min=256, local_max=32_768),
        ),
        # A small image classifier whose noise jumps at two decays of the learning rate.
        ModelledApplication(
            name="resnet-small", epochs=30, steps_per_epoch=2_000, state_bytes=9e7,
            throughput=PublishedThroughput(
                alpha_c=0.015, beta_c=2.5e-4, alpha_n=0.020, beta_n=4e-4, alpha_r=0.006, beta_r=2e-4, gamma=2.0
            ),
            noise=NoiseSchedule(start=800, end=20_000, decays=(0.4, 0.75), step=3.0),
            limits=BatchLimits(initial=128, maximum=8_192, local_min=16, local_max=1_024),
        ),
        # Fine-tuning of a language model: few epochs, a large gradient.
        ModelledApplication(
            name="bert-tune", epochs=4, steps_per_epoch=16_000, state_bytes=1.3e9,
            throughput=FabricThroughput(
                alpha_c=0.030, beta_c=0.010, node_transfer=0.050, node_latency=4e-4,
                local_transfer=0.010, local_latency=1e-4, gamma=2.0,
            ),
            noise=NoiseSchedule(start=150, end=900),
            limits=BatchLimits(initial=16, maximum=512, local_min=2, local_max=32),
        ),
        # Speech recognition, whose recurrent part leaves little room for overlap.
        ModelledApplication(
            name="speech", epochs=25, steps_per_epoch=4_000, state_bytes=4.8e8,
            throughput=FabricThroughput(
                alpha_c=0.060, beta_c=0.005, node_transfer=0.030, node_latency=8e-4,
                local_transfer=0.010, local_latency=2e-4, gamma=1.3,
            ),
            noise=NoiseSchedule(start=200, end=3_000, decays=(0.6,), step=2.0),
            limits=BatchLimits(initial=32, maximum=1_024, local_min=4, local_max=64),
        ),
        # Object detection: few images fit on a GPU, and the noise stays low for long.
        ModelledApplication(
            name="detector", epochs=24, steps_per_epoch=8_000, state_bytes=5e8,
            throughput=FabricThroughput(
                alpha_c=0.040, beta_c=0.020, node_transfer=0.060, node_latency=1e-3,
                local_transfer=0.020, local_latency=2e-4, gamma=1.6,
            ),
            noise=NoiseSchedule(start=60, end=1_000, decays=(0.65, 0.85), step=2.0),
            limits=BatchLimits(initial=16, maximum=512, local_min=2, local_max=16),
        ),
        # Pre-training of a large vision model: noisy gradients, so that it can use most of the cluster.
        ModelledApplication(
            name="vit-large", epochs=30, steps_per_epoch=15_000, state_bytes=3.6e9,
            throughput=FabricThroughput(
                alpha_c=0.030, beta_c=0.003, node_transfer=0.060, node_latency=5e-4,
                local_transfer=0.010, local_latency=1e-4, gamma=2.0, algorithm="tree",
            ),
            noise=NoiseSchedule(start=3_000, end=40_000),
            limits=BatchLimits(initial=256, maximum=16_384, local_min=8, local_max=128),
        ),
    )  # fmt: skip
    return {application.name: application for application in applications}


def builtin_workload() -> Workload:
    """Seventy jobs in four hours, for 16 nodes with 4 GPUs each: many small ones, a few large, one huge."""
    settings = GenerateSettings(num_jobs=70, hours=4.0, seed=2)
    return generate_workload(builtin_applications(), settings, name="built-in")
