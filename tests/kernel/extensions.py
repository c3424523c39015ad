"""The extensions of the suite: folders that can be deleted, with their entry points and their tests.

To add one:

1. Register it in pyproject.toml, under `[project.entry-points."sluice.GROUP"]`; the kernel finds it by
   `services.common.packages.extensions`, and imports nothing of its folders.
2. Add an `Extension` here, and its folders to the import-linter contract "The kernel imports no extension".
   `test_kernel_extensions.py` compares this list with pyproject.toml.
3. Run `make test-kernel ARGS="-k NAME"`: it deletes the folders, entry points and tests in a copy of the tree, installs
   the copy, starts the suite and runs the tests that are listed as `kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Extension:
    """One extension.

    Attributes:
        name: unique; no entry point needs to have it.
        folders: folders or modules that belong to it alone, as paths.
        entry_points: `group name` of each line in pyproject.toml.
        tests: files and folders of tests that need the extension.
        kernel: tests of the kernel that are run without it, besides `tests/kernel/serving.py`.
        extra: the extra with what it needs; empty: it needs no package more.
    """

    name: str
    folders: tuple[str, ...]
    entry_points: tuple[str, ...]
    tests: tuple[str, ...] = ()
    kernel: tuple[str, ...] = ()
    extra: str = ""


CLI_TESTS = (
    "tests/unit/cli/test_cli_doctor.py",
    "tests/unit/cli/test_cli_extensions.py",
    "tests/unit/cli/test_cli_plan.py",
    "tests/unit/cli/test_cli_top.py",
    "tests/unit/cli/test_cli_wrong_places.py",
)
GATEWAY_TESTS = (
    "tests/unit/gateway/admission",
    "tests/unit/gateway/pipeline",
    "tests/unit/gateway/streams",
    "tests/unit/gateway/workers",
    "tests/unit/gateway/test_gateway_extensions.py",
)
API_TESTS = (
    "tests/unit/gateway/http",
    "tests/unit/gateway/test_gateway_extensions.py",
    "tests/unit/gateway/test_gateway_operations.py",
    "tests/unit/gateway/apis/test_gateway_tokenize_endpoints.py",
)
ROUTER_TESTS = ("tests/unit/router/kv_index", "tests/unit/router/reservations", "tests/unit/router/sync")
WORKER_TESTS = (
    "tests/unit/worker/engines/test_worker_mock_engine.py",
    "tests/unit/worker/engines/test_worker_http_dialects.py",
    "tests/unit/worker/engines/test_worker_vllm_mapping.py",
    "tests/unit/worker/serving",
)

EXTENSIONS = (
    Extension(
        "api-anthropic",
        ("services/gateway/apis/anthropic",),
        ("sluice.apis anthropic",),
        tests=(
            "tests/e2e/test_e2e_anthropic.py",
            "tests/e2e/test_e2e_anthropic_thinking.py",
            "tests/unit/gateway/apis/test_gateway_anthropic_call_ids.py",
            "tests/unit/gateway/apis/test_gateway_anthropic_fields.py",
            "tests/unit/gateway/apis/test_gateway_apis_event_encoders.py",
        ),
        kernel=API_TESTS,
    ),
    Extension(
        "api-batches",
        ("services/gateway/apis/batches",),
        ("sluice.apis batches",),
        tests=(
            "tests/e2e/test_e2e_batches.py",
            "tests/integration/gateway/test_gateway_batch_accounting.py",
            "tests/integration/gateway/test_gateway_batch_store.py",
            "tests/unit/gateway/apis/test_gateway_batch_lines.py",
            "tests/unit/gateway/apis/test_gateway_batch_runner.py",
            "tests/unit/gateway/apis/test_gateway_batch_shares.py",
        ),
        kernel=API_TESTS,
    ),
    Extension(
        "api-fleet",
        ("services/gateway/apis/fleet",),
        ("sluice.apis fleet",),
        tests=("tests/e2e/test_e2e_operations.py",),
        kernel=API_TESTS,
    ),
    Extension(
        "api-generate",
        ("services/gateway/apis/generate",),
        ("sluice.apis generate",),
        tests=("tests/e2e/test_e2e_generate.py",),
        kernel=API_TESTS,
    ),
    Extension(
        "api-responses",
        ("services/gateway/apis/responses",),
        ("sluice.apis responses",),
        tests=(
            "tests/e2e/test_e2e_background_responses.py",
            "tests/e2e/test_e2e_conversations.py",
            "tests/e2e/test_e2e_open_responses.py",
            "tests/e2e/test_e2e_response_chains.py",
            "tests/e2e/test_e2e_response_socket_limits.py",
            "tests/e2e/test_e2e_response_sockets.py",
            "tests/e2e/test_e2e_responses.py",
            "tests/integration/gateway/test_gateway_background_races.py",
            "tests/integration/gateway/test_gateway_responses_kept.py",
            "tests/unit/gateway/apis/test_gateway_background_responses.py",
            "tests/unit/gateway/apis/test_gateway_responses_fields.py",
            "tests/unit/gateway/apis/test_gateway_responses_store.py",
            "tests/unit/gateway/apis/test_gateway_responses_tools.py",
            "tests/unit/gateway/apis/test_gateway_responses_truncation.py",
        ),
        kernel=API_TESTS,
    ),
    Extension(
        "api-scores",
        ("services/gateway/apis/scores",),
        ("sluice.apis scores",),
        tests=("tests/e2e/test_e2e_classify.py",),
        kernel=API_TESTS,
    ),
    Extension(
        "router-picker",
        ("services/router/picker",),
        ("sluice.router_servers picker",),
        tests=(
            "tests/e2e/test_e2e_picker_gateways.py",
            "tests/integration/router/test_router_picker.py",
            "tests/integration/router/test_router_picker_access.py",
            "tests/integration/router/test_router_picker_peers.py",
            "tests/integration/router/test_router_picker_tls.py",
            "tests/unit/router/picker",
        ),
        kernel=ROUTER_TESTS,
    ),
    Extension(
        "router-http",
        ("services/router/http_api",),
        ("sluice.router_servers http",),
        tests=(
            "tests/integration/router/test_router_http_api.py",
            "tests/security/test_security_http_turns.py",
            "tests/security/test_security_router_bodies.py",
            "tests/unit/router/http_api",
        ),
        kernel=ROUTER_TESTS,
    ),
    Extension(
        "engine-openai",
        ("services/worker/engines/openai",),
        ("sluice.engines openai",),
        tests=("tests/unit/worker/engines/test_worker_openai_body.py", "tests/e2e/test_e2e_openai_engines.py"),
        kernel=WORKER_TESTS,
        extra="http",
    ),
    Extension(
        "engine-vllm-grpc",
        ("services/worker/engines/vllm_grpc",),
        ("sluice.engines vllm-grpc",),
        tests=(
            "tests/integration/worker/test_worker_vllm_grpc_engine.py",
            "tests/unit/worker/engines/test_worker_vllm_grpc_media.py",
            "tests/unit/worker/engines/test_worker_vllm_grpc_wire.py",
        ),
        kernel=WORKER_TESTS,
        extra="vllm-grpc",
    ),
    Extension(
        "engine-sglang",
        ("services/worker/engines/sglang",),
        ("sluice.engines sglang",),
        tests=(
            "tests/unit/worker/engines/test_worker_sglang_mapping.py",
            "tests/unit/worker/engines/test_worker_sglang_media.py",
        ),
        kernel=WORKER_TESTS,
        extra="sglang",
    ),
    Extension(
        "engine-transformers",
        ("services/worker/engines/transformers",),
        ("sluice.engines transformers", "sluice.engines transformers-classifier"),
        tests=(
            "tests/unit/worker/engines/test_worker_transformers_cache.py",
            "tests/unit/worker/engines/test_worker_transformers_folder.py",
            "tests/unit/worker/engines/test_worker_transformers_pictures.py",
            "tests/unit/worker/engines/test_worker_transformers_stepping.py",
        ),
        kernel=WORKER_TESTS,
        extra="transformers",
    ),
    Extension(
        "worker-processing",
        ("services/worker/local_processing",),
        ("sluice.processing worker",),
        tests=(
            "tests/integration/worker/test_worker_remote_parsers.py",
            "tests/integration/worker/test_worker_processing_service.py",
            "tests/unit/worker/local_processing",
        ),
        kernel=WORKER_TESTS,
        extra="worker",
    ),
    Extension(
        "live-view",
        ("services/gateway/apis/live_view",),
        ("sluice.observers live-view",),
        tests=("tests/unit/gateway/live_view", "tests/browser", "tests/e2e/test_e2e_live_view.py"),
        kernel=GATEWAY_TESTS,
    ),
    Extension(
        "engine-prompts",
        ("services/preprocess/engines",),
        ("sluice.media image-processor", "sluice.tokenizers sglang", "sluice.tokenizers vllm"),
        tests=(
            "tests/e2e/test_e2e_processing.py",
            "tests/integration/preprocess/test_preprocess_media_processors.py",
            "tests/unit/preprocess/engines",
            "tests/unit/preprocess/tokenizers/test_preprocess_processor_rule.py",
        ),
        kernel=("tests/unit/preprocess/tokenizers", "tests/unit/preprocess/test_preprocess_settings.py"),
    ),
    Extension(
        "isolated-parsers",
        ("services/postprocess/parsers/engines", "services/postprocess/parsers/isolated"),
        ("sluice.parser_hosts custom", "sluice.parser_hosts engine"),
        tests=(
            "tests/integration/postprocess/test_postprocess_engine_isolation.py",
            "tests/integration/postprocess/test_postprocess_engine_versions.py",
            "tests/integration/postprocess/test_postprocess_own_parsers.py",
            "tests/integration/postprocess/test_postprocess_parser_starts.py",
            "tests/integration/worker/test_worker_remote_parsers.py",
            "tests/unit/postprocess/parsers/test_postprocess_native_parsers.py",
            "tests/unit/postprocess/parsers/test_postprocess_sendable_text.py",
        ),
        kernel=(
            "tests/unit/postprocess/parsers/test_postprocess_family_forms.py",
            "tests/unit/postprocess/parsers/test_postprocess_parsers.py",
            "tests/unit/postprocess/streams",
        ),
    ),
    Extension(
        "clips",
        ("services/preprocess/media/clips",),
        ("sluice.media clips",),
        tests=(
            "tests/unit/preprocess/media/test_preprocess_media_clips.py",
            "tests/unit/preprocess/media/test_preprocess_media_frame_counts.py",
            "tests/e2e/test_e2e_clips.py",
        ),
        kernel=("tests/unit/preprocess/media", "tests/unit/preprocess/test_preprocess_validate.py"),
        extra="clips",
    ),
    Extension(
        "engine-lists",
        ("sluice/cli/up/engines",),
        ("sluice.commands follow", "sluice.engine_lists file"),
        tests=(
            "tests/integration/cli/test_cli_follow.py",
            "tests/integration/cli/test_cli_up_engines.py",
            "tests/unit/cli/test_cli_engines.py",
            "tests/unit/cli/test_cli_engines_kubernetes.py",
            "tests/unit/cli/test_cli_worker_ports.py",
            "tests/unit/deploy/test_deploy_kubernetes_engines.py",
        ),
        kernel=CLI_TESTS,
        extra="http",
    ),
    Extension(
        "conformance",
        ("sluice/cli/conformance", "sluice/conformance", "sluice/testing"),
        ("sluice.commands conformance",),
        tests=(
            "tests/integration/worker/test_conformance_example_engine.py",
            "tests/integration/worker/test_conformance_rules.py",
            "tests/integration/worker/test_worker_engine_kit.py",
            "tests/support/fakes/worker_flaws.py",
            "tests/unit/cli/test_cli_conformance.py",
        ),
        kernel=CLI_TESTS,
        extra="worker",
    ),
)
