"""All environment variables of Pollux, with their meaning."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["JOB_VARIABLES", "TORCHRUN_VARIABLES", "USER_VARIABLES"]

JOB_VARIABLES: Mapping[str, str] = {
    "POLLUX_JOB": "name of the job, shown in its receipt",
    "POLLUX_GENERATION": "number of the generation: it rises at every start and re-allocation",
    "POLLUX_RUN_ID": "the same for all generations of a job, another for every job: its run's name in trackers",
    "POLLUX_URL": "address to which the job's agent reports; unset: it does not report",
    "POLLUX_JOB_TOKEN": "token of the agent, with which it can report and read this one job only",
    "POLLUX_SERVER_UID": "user who may serve that address on this machine, besides the own one and root",
    "POLLUX_CA": "certificate of the service that the agent trusts, as PEM text; by default POLLUX_CA_FILE",
    "POLLUX_CA_FILE": "file with that certificate; unset: only the system's certificates are trusted",
    "POLLUX_CHECKPOINT_DIR": "folder for checkpoints where the script names none",
    "POLLUX_CHECKPOINT_EVERY": "seconds between two checkpoints where the script names none",
    "POLLUX_NOTICE_SECONDS": "notice that nodes give before they are taken back; a job that saves slower saves ahead",
    "POLLUX_CHECKPOINT_KEEP": "number of checkpoints to keep where the script names none",
    "POLLUX_OUTPUT_DIR": "folder for the receipt where the script names none",
    "POLLUX_NUM_NODES": "number of nodes with replicas, where LOCAL_WORLD_SIZE does not say",
    "POLLUX_TIMEOUT": "seconds after which a collective that never completes is an error",
    "POLLUX_BATCH_SIZE": "the initial batch of the job file; the script's own wins where it names one",
    "POLLUX_MAX_BATCH_SIZE": "the ceiling of the batch of the job file; the script's own wins where it names one",
    "POLLUX_ADAPT": "'0': the batch stays the initial one, even with a largest batch; set by rigid policies",
    "POLLUX_MAX_LOCAL_BATCH": "the largest batch for one GPU: of the job file, or learned from running out of memory",
    "POLLUX_STOPPED_AT": "time of the last step of the replicas before, in seconds since 1970, to measure the pause",
    "POLLUX_STORE": "host:port of the job's store, where its replicas agree on changes of their number; unset: none",
    "POLLUX_STORE_SECRET": "host:port of the store where replicas meet, and the secret by which it knows them",
    "POLLUX_JOIN": "'1': this replica joins a job that runs, and gets its state from the others",
}
"""Set by the launcher for the processes of a job, and by people who run a script alone."""

USER_VARIABLES: Mapping[str, str] = {
    "POLLUX_HOME": "folder of the service's store, tokens and logs; ~/.local/state/pollux where unset",
    "POLLUX_SERVER": "address of the service that the command line talks to; found in POLLUX_HOME where unset",
    "POLLUX_SERVER_UID": "user who may serve that address on this machine, besides the own one, root and the token's",
    "POLLUX_TOKEN": "token of the command line; read from POLLUX_HOME where unset",
    "POLLUX_HANG_SECONDS": "silence after which a replica counts as hung and is ended, for local jobs; 30 where unset",
}
"""Read by the command line and the service."""

TORCHRUN_VARIABLES: Mapping[str, str] = {
    "RANK": "number of the replica among all, from 0",
    "LOCAL_RANK": "its number on its node",
    "GROUP_RANK": "number of its node",
    "ROLE_RANK": "the same as RANK",
    "ROLE_NAME": "always default",
    "WORLD_SIZE": "replicas of the job",
    "LOCAL_WORLD_SIZE": "replicas on this node",
    "GROUP_WORLD_SIZE": "nodes that hold replicas",
    "ROLE_WORLD_SIZE": "the same as WORLD_SIZE",
    "MASTER_ADDR": "where replica 0 listens for the others",
    "MASTER_PORT": "its port",
    "CUDA_VISIBLE_DEVICES": "the GPUs of this node that the job was given",
}
"""Set by the launcher with torchrun's meaning, like all `TORCHELASTIC_` variables; a job file must not set them."""
