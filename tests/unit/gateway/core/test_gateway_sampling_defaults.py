from __future__ import annotations

from services.gateway.clients.preprocess import _defaults
from services.gateway.core.request import SamplingParams
from sluice.v1 import common_pb2


def test_what_the_client_leaves_unset_is_what_the_model_recommends() -> None:
    recommended = _defaults(common_pb2.SamplingOptions(temperature=0.5, top_k=20, seed=7))
    assert recommended == SamplingParams(temperature=0.5, top_k=20)
    asked = SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias={1: 2.0})
    assert asked.or_else(recommended) == SamplingParams(
        temperature=0.0, top_k=20, frequency_penalty=1.0, logit_bias={1: 2.0}
    )


def test_without_recommendations_nothing_changes() -> None:
    asked = SamplingParams(top_p=0.5)
    assert asked.or_else(_defaults(common_pb2.SamplingOptions())) is asked
