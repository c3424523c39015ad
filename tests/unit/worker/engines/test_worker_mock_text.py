"""The mock's answers: readable, repeatable, and ending exactly where they should."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from services.common.packages import model_files as models
from services.worker.contract.generation import FinishReason, SamplingParams
from services.worker.engines.mock.text import LONGEST, SHORTEST, TextGenerator
from services.worker.engines.mock.vocabulary import MockVocabulary, declared_context_length, load_vocabulary
from tests.support.data.tiny_models import CONTEXT_LENGTH, build_tiny_model
from tests.support.fakes.engines import BOS, EOS, TURN, WordVocabulary, request

ENOUGH = 1_000


@pytest.fixture(scope="module")
def words() -> WordVocabulary:
    return WordVocabulary()


@pytest.fixture(scope="module")
def teller(words: WordVocabulary) -> TextGenerator:
    return TextGenerator(words)


@pytest.fixture(scope="module")
def tekken() -> MockVocabulary:
    return load_vocabulary(models.resolve(models.DEFAULT_SOURCE), "mistral")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MockVocabulary]:
    folder = build_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return folder, load_vocabulary(folder, "hf")


def test_answer_repeats_the_last_message_and_continues_in_sentences(tekken: MockVocabulary) -> None:
    said = "Why is the sky blue, and the sea?"
    prompt = [1, 3, *tekken.encode("An earlier and much longer question of the user's own."), 4]
    prompt += [3, *tekken.encode(said), 4]
    answer = TextGenerator(tekken).answer(request(prompt=prompt), ENOUGH)
    text = tekken.decode(answer.token_ids)
    assert text.startswith(f"You said: {said} The ")
    assert text.endswith(".")
    assert "\ufffd" not in text
    assert "  " not in text
    assert answer.reason is FinishReason.STOP
    assert answer.stop_token_id == answer.token_ids[-1] == tekken.eos_ids[0]


def test_answer_to_a_chatml_prompt_repeats_the_user_message(tiny: tuple[Path, MockVocabulary]) -> None:
    _, vocabulary = tiny
    begin, end = 1, 2
    prompt = [begin, *vocabulary.encode("system\nYou are terse and very, very helpful."), end, *vocabulary.encode("\n")]
    prompt += [begin, *vocabulary.encode("user\nWhat is the weather?"), end, *vocabulary.encode("\n")]
    prompt += [begin, *vocabulary.encode("assistant\n")]
    text = vocabulary.decode(TextGenerator(vocabulary).answer(request(prompt=prompt), ENOUGH).token_ids)
    assert text.startswith("You said: What is the weather? The ")


def test_a_cut_character_in_the_prompt_does_not_reach_the_answer(tekken: MockVocabulary) -> None:
    broken = tekken.encode("snow 🧑‍🚀")[:-1]
    text = tekken.decode(TextGenerator(tekken).answer(request(prompt=[1, 3, *broken, 4]), ENOUGH).token_ids)
    assert text.startswith("You said: snow")
    assert "\ufffd" not in text


@given(seed=st.integers(0, 10_000))
def test_natural_ends_are_finite_and_come_once(seed: int) -> None:
    teller = _shared_teller()
    answer = teller.answer(request(sampling=SamplingParams(seed=seed)), ENOUGH)
    assert SHORTEST <= len(answer.token_ids) <= LONGEST + 20
    assert answer.token_ids.count(EOS) == 1
    assert answer.token_ids[-1] == EOS
    assert TURN not in answer.token_ids
    assert BOS not in answer.token_ids


@settings(max_examples=60, deadline=None)
@given(taken=st.integers(1, 200), seed=st.integers(0, 50), least=st.integers(0, 120))
def test_a_resumed_request_goes_on_where_the_first_worker_stopped(taken: int, seed: int, least: int) -> None:
    teller = _shared_teller()
    sampling = SamplingParams(seed=seed)
    whole = teller.answer(request(sampling=sampling, min_tokens=least), ENOUGH)
    head, tail = whole.token_ids[:taken], whole.token_ids[taken:]
    if not tail:
        return
    resumed = request(
        prompt=(BOS, 20, 21, TURN, *head),
        sampling=sampling,
        min_tokens=max(least - len(head), 0),
        resumed_tokens=len(head),
    )
    answer = teller.answer(resumed, ENOUGH - len(head))
    assert answer.token_ids == tail
    assert (answer.reason, answer.stop_token_id) == (whole.reason, whole.stop_token_id)


def test_a_resumed_request_past_its_end_ends_with_the_next_sentence(teller: TextGenerator) -> None:
    answer = teller.answer(request(prompt=(BOS, *range(20, 720)), resumed_tokens=700), ENOUGH)
    assert 1 <= len(answer.token_ids) <= 20
    assert answer.reason is FinishReason.STOP


def test_a_model_without_eos_ends_with_its_last_sentence() -> None:
    words = WordVocabulary()
    words.eos_ids = ()
    answer = TextGenerator(words).answer(request(), ENOUGH)
    assert answer.reason is FinishReason.STOP
    assert answer.stop_token_id is None


def test_a_model_folder_is_read_for_what_the_engine_needs(tiny: tuple[Path, MockVocabulary]) -> None:
    folder, vocabulary = tiny
    assert declared_context_length(folder) == CONTEXT_LENGTH
    assert vocabulary.special_ids == {0, 1, 2}
    assert set(vocabulary.eos_ids) <= {0, 2}
    assert vocabulary.eos_ids
    assert vocabulary.decode(vocabulary.encode("a plain text")) == "a plain text"


_teller: list[TextGenerator] = []


def _shared_teller() -> TextGenerator:
    """Hypothesis does not mix with function-scoped fixtures; the vocabulary is the same for all."""
    if not _teller:
        _teller.append(TextGenerator(WordVocabulary()))
    return _teller[0]


def test_a_script_is_the_whole_answer_with_its_special_tokens(tekken: MockVocabulary) -> None:
    script = '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Zürich 🌧"}}]'
    prompt = [1, 3, *tekken.encode(f"Call it. <<<script: {script}>>> Please."), 4]
    answer = TextGenerator(tekken).answer(request(prompt=prompt), ENOUGH)
    assert answer.token_ids[0] == tekken.special_names["[TOOL_CALLS]"]
    assert tekken.decode(answer.token_ids) == script.removeprefix("[TOOL_CALLS]")
    assert answer.reason is FinishReason.STOP
    assert answer.stop_token_id == answer.token_ids[-1] == tekken.eos_ids[0]
    cut = TextGenerator(tekken).answer(request(prompt=prompt), 3)
    assert (cut.token_ids, cut.reason) == (answer.token_ids[:3], FinishReason.LENGTH)


def test_decoded_ids_are_the_text_of_the_library(tekken: MockVocabulary) -> None:
    library = Tekkenizer.from_file(models.resolve(models.DEFAULT_SOURCE))
    chosen = Random(0)
    cut = tekken.encode("Zürich 🌧")
    samples = [[1, *cut[:-1], 3, cut[-1]], [], [chosen.randrange(library.num_special_tokens) for _ in range(9)]]
    samples += [[chosen.randrange(tekken.size) for _ in range(200)] for _ in range(20)]
    for ids in samples:
        assert tekken.decode(ids) == library.decode(ids)


def test_script_far_before_the_end_of_a_prompt_is_found_and_the_last_one_counts(tekken: MockVocabulary) -> None:
    prompt = [1, 3, *tekken.encode("<<<script: first>>> and <<<script: second>>> " + "more words " * 2_000), 4]
    answer = TextGenerator(tekken).answer(request(prompt=prompt), ENOUGH)
    assert tekken.decode(answer.token_ids) == "second"


@pytest.mark.parametrize(
    ("coded", "text"),
    [
        (b64encode('say "hi" 🌧'.encode()).decode(), 'say "hi" 🌧'),
        ("?", "This script is not base64: ?"),
    ],
)
def test_script_in_base64_is_decoded(tekken: MockVocabulary, coded: str, text: str) -> None:
    prompt = [1, 3, *tekken.encode(f'{{"content": "<<<script64: {coded}>>>"}}'), 4]
    answer = TextGenerator(tekken).answer(request(prompt=prompt), ENOUGH)
    assert tekken.decode(answer.token_ids) == text


def test_a_script_speaks_for_any_tokenizer(tiny: tuple[Path, MockVocabulary]) -> None:
    _, vocabulary = tiny
    prompt = [1, *vocabulary.encode("user\n<<<script: <think>a</think>b>>>"), 2]
    answer = TextGenerator(vocabulary).answer(request(prompt=prompt), ENOUGH)
    assert vocabulary.decode(answer.token_ids) == "<think>a</think>b"
