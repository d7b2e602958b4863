"""Options of a scorer, and errors that name the option, the value and the allowed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcm.config import ConfigError
from kvcm.scorer.settings import KvIndexerAddress, ListenAddress, PodModel, ScorerSettings, TierWeights, settings_of

INDEX = {"manager": ["m:1"], "kv_indexer": ["5=i"]}
PODS = {"manager": ["m:1"], "pod_scores": ["5"], "model": ["a/b=i"], "tokenizer": ["a/b=/t"]}


def test_options_become_settings() -> None:
    missing = {"api_key_file": None, "insecure": False, "max_blocks": None}
    found = settings_of({**INDEX, **missing, "kv_indexer": ["5=i", "[::1]:0=j=k", "localhost:6=l"]})
    assert found == ScorerSettings(
        managers=("m:1",),
        kv_indexers=(
            KvIndexerAddress(ListenAddress("127.0.0.1", 5), "i"),
            KvIndexerAddress(ListenAddress("::1", 0), "j=k"),
            KvIndexerAddress(ListenAddress("localhost", 6), "l"),
        ),
    )
    assert [str(each.listen) for each in found.kv_indexers] == ["127.0.0.1:5", "[::1]:0", "localhost:6"]
    pods = settings_of({**PODS, "weight": ["storage=0.1", "gpu=0.9"], "pod": ["h:1=p"], "tokenizer": ["a/b=/x=y"]})
    assert pods.models == {"a/b": PodModel("i", Path("/x=y"))}
    assert pods.weights == TierWeights(gpu=0.9, storage=0.1)
    assert pods.pods == {"h:1": "p"}
    assert pods.has_special_tokens
    assert not settings_of({**PODS, "no_special_tokens": True}).has_special_tokens


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"kv_indexer": ["5=i"]}, "--manager is missing"),
        ({"manager": ["m:1"]}, "neither --kv-indexer nor --pod-scores is given"),
        ({**INDEX, "manager": ["m"]}, "--manager is ['m'], must be HOST:PORT"),
        ({**INDEX, "manager": ["m:0"]}, "--manager is ['m:0'], must be HOST:PORT"),
        ({**INDEX, "manager": ["m:1", "m:1"]}, "must be HOST:PORT of a manager's gRPC calls, each once"),
        ({**INDEX, "kv_indexer": ["5"]}, "--kv-indexer is ['5'], must be LISTEN=INSTANCE_ID"),
        ({**INDEX, "kv_indexer": ["5=a b"]}, "must be LISTEN=INSTANCE_ID"),
        ({**INDEX, "kv_indexer": ["host.example:5=i"]}, "must be PORT or HOST:PORT with an ip address or localhost"),
        ({**INDEX, "kv_indexer": ["65536=i"]}, "must be PORT or HOST:PORT"),
        ({**INDEX, "kv_indexer": ["5=i", "5=j"]}, "must be another one for each"),
        ({**INDEX, "metrics": "5"}, "addresses are 127.0.0.1:5, 127.0.0.1:5, must be another one for each"),
        ({**INDEX, "worker": ["a:1"]}, "--worker is ['a:1'], must be ENGINE=URL"),
        ({**INDEX, "worker": ["a:1=x", "a:1=y"]}, "must be ENGINE=URL, each once"),
        ({**INDEX, "worker": ["a:1=x", "b:1=x"]}, "two engines have the same worker"),
        ({**INDEX, "max_blocks": 0}, "--max-blocks is 0, must be a whole number from 1"),
        ({**INDEX, "score_timeout_ms": 0}, "--score-timeout-ms is 0, must be a whole number from 1 to 3600000"),
        ({**INDEX, "log_level": "LOUD"}, "--log-level is 'LOUD', must be DEBUG, INFO, WARN, ERROR"),
        (
            {**INDEX, "kv_indexer": ["0.0.0.0:5=i"]},
            "0.0.0.0:5 is an address that other hosts reach, must be a loopback",
        ),
        ({**INDEX, "metrics": "[::]:6"}, "--metrics is [::]:6, which other hosts reach without a key"),
        ({**PODS, "model": []}, "--model has no entry for model 'a/b'"),
        ({**PODS, "tokenizer": []}, "--tokenizer has no entry for model 'a/b'"),
        ({**PODS, "model": [], "tokenizer": []}, "--pod-scores and --model go together"),
        ({**PODS, "pod_scores": [], "kv_indexer": ["5=i"]}, "--pod-scores and --model go together"),
        ({**PODS, "model": ["a/b=x y"]}, "--model is ['a/b=x y'], must be MODEL=INSTANCE_ID"),
        ({**PODS, "weight": ["ssd=1"]}, "--weight is ['ssd=1'], must be TIER=WEIGHT with gpu, cpu, disk or storage"),
        ({**PODS, "weight": ["gpu=nan"]}, "must be TIER=WEIGHT"),
        ({**PODS, "weight": ["gpu=2"]}, "a number from 0 to 1"),
        ({**PODS, "weight": ["gpu=x"]}, "a number from 0 to 1"),
        ({**PODS, "weight": ["storage=0.9"]}, "must be ordered: gpu >= cpu >= disk and storage"),
        ({**PODS, "pod": ["a:1=p", "b:1=p"]}, "two engines have the same worker or pod"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(options)
    assert error in str(caught.value)


def test_other_hosts_are_served_with_a_key_or_when_that_is_wanted() -> None:
    for more in ({"api_key_file": "key"}, {"insecure": True}):
        assert not settings_of({**INDEX, "kv_indexer": ["0.0.0.0:5=i"], **more}).kv_indexers[0].listen.is_loopback
    assert settings_of({**INDEX, "metrics": "[::]:6", "insecure": True}).metrics == ListenAddress("::", 6)
