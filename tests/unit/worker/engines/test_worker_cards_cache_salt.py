"""Engines without a prefix cache keep tenants apart by themselves, and their cards say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from services.worker.contract.capabilities import Capability
from services.worker.engines.sglang import card as sglang
from services.worker.engines.vllm import card as vllm


@pytest.mark.parametrize("caches", [True, False])
def test_vllm_claims_salts_with_and_without_a_prefix_cache(caches: bool) -> None:
    config = MagicMock()
    config.cache_config.enable_prefix_caching = caches
    config.model_config.runner_type = "generate"
    config.parallel_config.data_parallel_size = 1
    found = vllm.capabilities(config, has_events=caches)
    assert Capability.CACHE_SALT in found
    assert (Capability.CLEAR_CACHE in found) is caches


@pytest.mark.parametrize("caches", [True, False])
def test_sglang_claims_salts_with_and_without_a_prefix_cache(caches: bool) -> None:
    values: dict[str, Any] = {"disable_radix_cache": not caches, "dp_size": 1, "disaggregation_mode": "null"}
    manager = SimpleNamespace(is_generation=True, config_value=lambda name: values.get(name))
    found = sglang.capabilities(SimpleNamespace(tokenizer_manager=manager))
    assert Capability.CACHE_SALT in found
    assert (Capability.KV_EVENTS in found) is caches
