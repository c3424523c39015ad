"""Prompts equal those of templates as documented and of mistral-common; reasons explain only what they prove."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from services.preprocess.contract.tokenizer import ChatRequest
from tests.certificate import plan
from tests.certificate.bodies import APIS, Body
from tests.certificate.changes import not_continued
from tests.certificate.comparison import Comparison, Verdict, compare
from tests.certificate.conversations import FEATURES, Conversation, conversation
from tests.certificate.explaining import Reason, explain
from tests.certificate.reasons import REASONS
from tests.certificate.running import Run
from tests.certificate.sides.plain import PlainSide
from tests.certificate.sides.side import Case, Result
from tests.certificate.sides.sluice import SluiceSide
from tests.certificate.tally import Tally
from tests.certificate.templates import MISTRAL, OWN, build, mistral

EACH = 4
"""Conversations of each cell."""
FITTED = ("developer", "two systems", "late system", "effort", "continued turn", "cut turn")
"""Features for which Sluice does more than the documentation of templates says."""
WHOLE = ("plain", "tools", "parallel calls", "reasoning")
"""Features of answers of which is known what they say."""
TOLD = frozenset(FEATURES) - frozenset(FITTED)


@pytest.fixture(scope="module")
def ours() -> SluiceSide:
    return SluiceSide()


@pytest.fixture(scope="module")
def run(ours: SluiceSide, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folders = build(tmp_path_factory.mktemp("models"), {"own-chatml": OWN["own-chatml"]})
    side = PlainSide()
    yield Run(ours, [side], {**folders, **mistral()}, plan.formats())
    side.close()


def of(run: Run, subject: str, feature: str) -> list[Comparison]:
    return list(run.cell(plan.Cell(subject, "chat", feature), EACH, 0))


@pytest.mark.parametrize("feature", sorted(TOLD))
def test_prompts_equal_those_of_the_template_as_documented(run: Run, feature: str) -> None:
    found = of(run, "own-chatml", feature)
    assert {comparison.verdict for comparison in found} <= {Verdict.EQUAL}, found


@pytest.mark.parametrize("feature", ["plain", "system"])
@pytest.mark.parametrize("subject", sorted(MISTRAL))
def test_prompts_equal_those_of_mistral_common(run: Run, subject: str, feature: str) -> None:
    found = of(run, subject, feature)
    assert [comparison.verdict for comparison in found] == [Verdict.EQUAL] * EACH


@pytest.mark.parametrize("feature", FITTED)
def test_fitted_prompts_show_every_word(run: Run, feature: str) -> None:
    for comparison in of(run, "own-chatml", feature):
        assert not comparison.lost, comparison
        assert comparison.verdict in (Verdict.EQUAL, Verdict.DIFFERENT, Verdict.THEY_REFUSE), comparison
        assert not comparison.missing, comparison


@pytest.mark.parametrize("api", ["responses", "messages"])
def test_bodies_of_each_api_give_the_prompt_of_the_chat(run: Run, ours: SluiceSide, api: str) -> None:
    for number in range(EACH):
        chat = conversation("plain", number)
        cases = [
            plan.PromptCase(plan.Cell("own-chatml", name, "plain"), chat, body) for name, body in bodies(chat, api)
        ]
        ours.send([run.body(case) for case in cases])
        first, second = ours.receive()
        assert first["ids"] == second["ids"]


def bodies(chat: Conversation, api: str) -> Iterator[tuple[str, Body]]:
    for name in ("chat", api):
        body = APIS[name](chat)
        assert body is not None
        # Messages switches thinking off unless a request asks for it.
        yield name, {**body, "enable_thinking": False} if (name, api) == ("chat", "messages") else body


def test_changed_id_is_a_difference_without_a_reason(run: Run) -> None:
    (case,) = list_of_one(plan.Cell("own-chatml", "chat", "plain"))
    found = compare(case, "vllm", {"ids": [1, 2], "schema": None}, {"ids": [1, 3], "schema": None}, str)
    assert found is not None
    assert found.verdict is Verdict.DIFFERENT
    tally = Tally()
    tally.add(found, explain(found, REASONS, run.changed))
    assert tally.unexplained_count == 1


def test_word_that_only_the_engine_shows_is_lost() -> None:
    (case,) = list_of_one(plan.Cell("own-chatml", "chat", "plain"))
    texts = {1: "w1q", 2: ""}
    found = compare(case, "vllm", {"ids": [2]}, {"ids": [1]}, lambda ids: texts[ids[0]])
    assert found is not None
    assert found.lost == {"w1q"}
    tally = Tally()
    tally.add(found, ())
    assert tally.lost == [found]


def test_reason_explains_only_what_becomes_equal_by_it(run: Run) -> None:
    begun = Reason("begins a new turn", "", "either", "plain", change=not_continued)
    (case,) = list_of_one(plan.Cell("own-chatml", "chat", "continued turn"))
    ids = run.changed(case, [not_continued])
    assert ids is not None
    right = Comparison(case, "plain", Verdict.DIFFERENT, ("ids",), their_ids=tuple(ids))
    assert explain(right, [begun], run.changed) == [begun]
    assert explain(replace(right, their_ids=(*ids, 1)), [begun], run.changed) == []
    assert explain(replace(right, engine="vllm"), [begun], run.changed) == []


def test_reasons_that_are_needed_together_are_found_without_others(run: Run) -> None:
    def named(name: str, text: str) -> Reason:
        def change(chat: ChatRequest) -> ChatRequest:
            return replace(chat, messages=[*chat.messages, {"role": "user", "content": text}])

        return Reason(name, "", "either", "plain", change=change)

    first, second = named("first", "a"), named("second", "b")
    nothing = Reason("nothing", "", "either", "plain", change=lambda chat: chat)
    (case,) = list_of_one(plan.Cell("own-chatml", "chat", "plain"))
    ids = run.changed(case, [reason.change for reason in (first, second) if reason.change])
    assert ids is not None
    found = Comparison(case, "plain", Verdict.DIFFERENT, ("ids",), their_ids=tuple(ids))
    assert explain(found, [first, nothing, second], run.changed) == [first, second]


def list_of_one(cell: plan.Cell) -> list[plan.PromptCase]:
    case = next(plan.cases(cell, {}, 0))
    assert isinstance(case, plan.PromptCase)
    return [case]


def test_names_of_reasons_are_unique() -> None:
    assert len({reason.name for reason in REASONS}) == len(REASONS)


class Fixed:
    """A side that reads in every answer nothing."""

    name, version, apis = "vllm", "fixed", frozenset({"answers"})

    def send(self, cases: Sequence[Case]) -> None:
        self.count = len(cases)

    def receive(self) -> list[Result]:
        nothing = {"content": "", "reasoning": "", "calls": {}, "finish": "stop", "reasoning_tokens": 0}
        return [nothing] * self.count

    def close(self) -> None:
        """Does nothing."""


@pytest.fixture(scope="module")
def answers(ours: SluiceSide, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folders = build(tmp_path_factory.mktemp("answers"), {"own-chatml": OWN["own-chatml"]})
    return Run(ours, [Fixed()], folders, plan.formats())


@pytest.mark.parametrize("name", sorted(plan.formats()))
def test_whole_answers_are_read_as_they_were_written(answers: Run, name: str) -> None:
    cells = [cell for cell in plan.answer_cells({name: plan.formats()[name]}) if cell.feature in WHOLE]
    found = [comparison for cell in cells for comparison in answers.cell(cell, EACH, 0)]
    assert [comparison for comparison in found if not explain(comparison, REASONS, answers.changed)] == []


def test_every_reason_says_what_is_checked() -> None:
    assert [reason.name for reason in REASONS if not reason.proof] == []
