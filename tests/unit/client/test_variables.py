"""Which variables ``env=`` means, and which it refuses."""

from __future__ import annotations

import re

import pytest

from rpcdataloader.client.modules import choose_variables

ENVIRON = {
    "HF_HOME": "/hf",
    "HF_TOKEN": "secret of theirs",
    "AWS_PROFILE": "me",
    "LD_PRELOAD": "/x.so",
    "CUDA_VISIBLE_DEVICES": "1",
    "SLURM_JOB_ID": "7",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "gpu01",
    "RPCDATALOADER_TOKEN": "ours",
    "RPCDATALOADER_WORKERS": "node01:1",
}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (None, {}),
        ([], {}),
        (["AWS_PROFILE", "NOT_SET"], {"AWS_PROFILE": "me"}),
        (("HF_*",), {"HF_HOME": "/hf", "HF_TOKEN": "secret of theirs"}),
        (iter(["hf_*", "HF_HOM?", "A[VW]S_*"]), {"HF_HOME": "/hf", "AWS_PROFILE": "me"}),
        (["*"], {"HF_HOME": "/hf", "HF_TOKEN": "secret of theirs", "AWS_PROFILE": "me"}),
        (["R*", "LD_PRELOA[D]"], {}),
        ({"OMP_NUM_THREADS": "2", "A*": "no pattern"}, {"OMP_NUM_THREADS": "2", "A*": "no pattern"}),
        (["LD_PRELOAD", "SLURM_JOB_ID"], {"LD_PRELOAD": "/x.so", "SLURM_JOB_ID": "7"}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": ""}),
    ],
)
def test_names_patterns_and_values(env, expected):
    assert choose_variables(env, ENVIRON) == expected


@pytest.mark.parametrize(
    ("env", "error", "text"),
    [
        ("HF_*", TypeError, "env must be a list of names and patterns, or a mapping"),
        (3, TypeError, "functools.partial"),
        (["RPCDATALOADER_TOKEN"], ValueError, "RPCDATALOADER_TOKEN is the secret, which is never sent"),
        ({"RPCDATALOADER_TOKEN": "x"}, ValueError, "RPCDATALOADER_TOKEN is the secret, which is never sent"),
        ({"A": 2}, ValueError, "the value of A must be a string, but is 2"),
        ({"A": "x\0"}, ValueError, "the value of A must be a string"),
        (["A=2"], ValueError, "'A=2' is not a valid name of an environment variable"),
        ([""], ValueError, "'' is not a valid name"),
        ([4], ValueError, "4 is not a valid name"),
    ],
)
def test_what_makes_no_sense_is_refused(env, error, text):
    with pytest.raises(error, match=re.escape(text)):
        choose_variables(env, ENVIRON)
