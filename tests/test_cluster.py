"""Cluster files: the shipped ones load, values are read as SLURM reads them, and each mistake is refused by its key and value with a remedy.

Run: pytest tests/test_cluster.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_elastic.cluster import CLUSTERS, Cluster, cluster_names, load_cluster
from megatron_elastic.errors import ConfigError
from megatron_elastic.hardware import GPUS

PLAIN = {"format_version": 1, "device": "cuda", "gpu": "H100-SXM", "gpus_per_node": 8, "time": "04:00:00"}


def written(directory: Path, **changes: object) -> str:
    """The path of a cluster file with changes."""
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(PLAIN | changes), encoding="utf-8")
    return str(path)


def test_the_shipped_clusters_load():
    assert cluster_names() == ["cpu", "h100", "h100_bare"]
    assert [load_cluster(name).device for name in cluster_names()] == ["cpu", "cuda", "cuda"]
    assert load_cluster("h100").container is not None and load_cluster("h100_bare").container is None
    assert load_cluster(str(CLUSTERS / "cpu.yaml")) == load_cluster("cpu")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("30:15", 1815), ("04:00:00", 14400), ("1-02", 93600), ("2-00:30", 174600), ("1-00:00:01", 86401)],
)
def test_times_are_slurms(tmp_path, text, seconds):
    assert load_cluster(written(tmp_path, time=text, signal_lead=1)).time_seconds == seconds


@pytest.mark.parametrize(("text", "size"), [("2", 2 * 2**20), ("512G", 512 * 2**30), ("1T", 2**40), ("0", None), (None, None)])
def test_memory_is_slurms(tmp_path, text, size):
    assert load_cluster(written(tmp_path, memory=text)).memory_bytes == size


WRONG = [
    ({"gpus_per_nod": 8}, "gpus_per_nod is not a known key; did you mean gpus_per_node?"),
    ({"gpus_per_node": 0}, "gpus_per_node 0 must be at least 1"),
    ({"gpu": "H100-SMX"}, "gpu 'H100-SMX' is not known; did you mean H100-SXM?"),
    ({"gpu": "TPU"}, "gpu 'TPU' is not known; known: A100-40GB,"),
    ({"device": "cpu"}, "gpu 'H100-SXM' needs device cuda; remove it"),
    ({"device": "tpu"}, "device 'tpu'"),
    ({"time": 14400}, "time 14400 (int) must be str"),
    ({"time": "4 hours"}, "time '4 hours' is no time of SLURM's; write HH:MM:SS"),
    ({"time": "0"}, "time '0' is no time of SLURM's"),
    ({"signal_lead": 14400}, "signal_lead 14400 must be below the 14400 seconds of time '04:00:00'; lower it"),
    ({"signal_lead": 0}, "signal_lead 0 must be at least 1"),
    ({"memory": "lots"}, "memory 'lots' is no amount of SLURM's; write it as in memory: 512G"),
    ({"partition": "batch\n#SBATCH --wrap=id"}, "partition 'batch\\n#SBATCH --wrap=id' must be one word"),
    ({"account": "a; touch x"}, "account 'a; touch x' must be one word"),
    ({"container": {"mounts": []}}, "container.image is missing; add it"),
    ({"container": {"image": ""}}, "container.image '' must be a line of text"),
    ({"container": {"image": "i", "mounts": ["/data"]}}, "container.mounts[0] '/data' must be SOURCE:DESTINATION without commas"),
    ({"container": {"image": "i", "mounts": ["/a:/b,/etc:/etc"]}}, "container.mounts[0] '/a:/b,/etc:/etc' must be SOURCE:DESTINATION"),
    ({"environment": {"A B": "1"}}, "environment.A B is not the name of a variable"),
    ({"environment": {"A": 1}}, "environment"),
    ({"environment": {"HF_TOKEN": "x"}}, "environment.HF_TOKEN: a secret would stand in scripts and logs; export it"),
    ({"environment": {"MASTER_ADDR": "localhost"}}, "environment.MASTER_ADDR is set for every job by its launcher; remove it"),
    ({"environment": {"A": "1\n2"}}, "environment.A '1\\n2' must be one line of text"),
    ({"format_version": 2}, "format_version 2 is not 1; set it to 1"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_each_mistake_has_its_message(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        load_cluster(written(tmp_path, **changes))
    assert message in str(caught.value)


def test_mistakes_come_together(tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_cluster(written(tmp_path, gpus_per_node=0, gpu="none", time="x", memory="y"))
    assert len(caught.value.problems) == 4


def test_a_cluster_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--cluster 'h10' is not a cluster; did you mean h100\\?; or give the path of a YAML file"):
        load_cluster("h10")
    with pytest.raises(ConfigError, match="no cluster at 'my.yaml'; clusters: cpu, h100, h100_bare; or give the path of a YAML file"):
        load_cluster("my.yaml")
    with pytest.raises(ConfigError, match=r"no cluster at 'elsewhere/h10.yml'; did you mean h100\?; or give the path of a YAML file"):
        load_cluster("elsewhere/h10.yml")
    monkeypatch.setattr("megatron_elastic.cluster.CLUSTERS", tmp_path / "none")
    for name in ("h100", "h100.yaml"):
        with pytest.raises(ConfigError, match="an installed package has none; or give the path"):
            load_cluster(name)


def test_every_gpu_says_where_its_figures_are_from():
    assert all("data sheet" in gpu.source and gpu.bf16_flops > gpu.fp32_flops and gpu.memory > 2**34 for gpu in GPUS.values())
    assert all(Cluster(**PLAIN | {"gpu": name}).problems() == [] for name in GPUS)
