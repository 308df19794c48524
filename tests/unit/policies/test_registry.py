"""From names and options to policies. An error names the wrong part."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from scheduler_svc.core.policy.order import PolicyError
from scheduler_svc.policies.api import CapacityPolicy, RequestView, Step, Verdict
from scheduler_svc.policies.batch.decode_first import DecodeFirst
from scheduler_svc.policies.capacity.watermark import Watermark
from scheduler_svc.policies.order.fcfs import FirstComeFirstServed
from scheduler_svc.policies.preemption.last_in import LastIn
from scheduler_svc.policies.presets import PRESETS
from scheduler_svc.policies.registry import KINDS, build, check_given, choose, find

if TYPE_CHECKING:
    from decimal import Decimal

HERE = __name__


def own(class_name: str) -> str:
    return f"{HERE}:{class_name}"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])


class Typed(Watermark):
    def __init__(self, level: Literal[1, 2] = 1, names: list[str] | None = None, **rest: Any) -> None:
        super().__init__()
        self.level, self.names, self.rest = level, names, rest


class Untyped(Watermark):
    def __init__(self, anything: Any = None) -> None:
        super().__init__()
        self.anything = anything


class Needy(Watermark):
    def __init__(self, level: int) -> None:
        super().__init__()


class TypedForCheckersAlone(Watermark):
    def __init__(self, price: Decimal) -> None:
        super().__init__()


class Uncheckable(Watermark):
    def __init__(self, thing: FirstComeFirstServed | None = None) -> None:
        super().__init__()


class Fails(Watermark):
    def __init__(self) -> None:
        raise RuntimeError("not today")


class Abstract(CapacityPolicy):
    pass


class StatesNonsense(CapacityPolicy):
    reserves_prompt = "sometimes"  # type: ignore[assignment]

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        return Verdict.ADMIT


class Moody(StatesNonsense):
    asked = 0

    @property
    def reserves_prompt(self) -> bool:  # type: ignore[override]
        Moody.asked += 1
        if Moody.asked > 1:
            raise RuntimeError("not today")
        return False


class Slotted(CapacityPolicy):
    __slots__ = ("reserves_prompt",)

    def __init__(self) -> None:
        self.reserves_prompt = True  # type: ignore[misc]

    def admit(self, step: Step, request: RequestView, need_blocks: int) -> Verdict:
        return Verdict.ADMIT


class Sideways(LastIn):
    def __init__(self) -> None:
        super().__init__("sideways")  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_can_be_built(preset: str) -> None:
    policies, choice = build(choose(preset)), PRESETS[preset]
    assert [type(getattr(policies, kind)) for kind in KINDS] == [find(kind, getattr(choice, kind)) for kind in KINDS]


def test_options_reach_their_policies() -> None:
    policies = build(choose("vllm-v1", {"capacity": own("Typed")}, {"level": 2, "names": ["a"]}))
    assert isinstance(policies.capacity, Typed)
    assert (policies.capacity.level, policies.capacity.names, policies.capacity.rest) == (2, ["a"], {})
    assert build(choose("", {"capacity": own("Untyped")}, {"anything": {"goes": 1}})).capacity.anything == {"goes": 1}  # type: ignore[attr-defined]


def test_a_change_keeps_the_other_policies_and_options() -> None:
    base = choose("sglang", {"order": "lpm"}, {"retract_decode_steps": 5})
    changed = choose("", {"batch": "decode-first"}, {"init_new_token_ratio": 0.5}, base)
    assert (changed.order, changed.capacity, changed.batch) == ("lpm", "token-ratio", "decode-first")
    assert changed.options == {"requeue": "back", "retract_decode_steps": 5, "init_new_token_ratio": 0.5}
    assert isinstance(build(changed).batch, DecodeFirst)


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ({"order": "best"}, {}, r"order: 'best' is none of .*fcfs.*, and no module:Class"),
        ({"order": "watermark"}, {}, r"order: 'watermark' is none of "),
        ({"order": own("Typed")}, {}, r"order: .* is no OrderPolicy"),
        ({"order": "no_such_module:X"}, {}, r"order: no_such_module:X cannot be imported: No module"),
        ({"order": own("Absent")}, {}, r"order: .*Absent cannot be imported"),
        ({"order": ":"}, {}, r"order: : cannot be imported"),
        ({"capacity": own("Typed")}, {"level": 3}, r"options\.level: Input should be 1 or 2, not 3"),
        ({"capacity": own("Typed")}, {"names": "a"}, r"options\.names: "),
        ({"capacity": own("Typed")}, {"rest": {}}, r"options\.rest: no policy has such an option; there are "),
        ({"capacity": own("Needy")}, {}, r"capacity Needy: .*missing 1 required"),
        ({"capacity": own("Fails")}, {}, r"capacity Fails: not today"),
        ({"capacity": own("Abstract")}, {}, r"capacity Abstract: .*abstract"),
        ({"capacity": own("TypedForCheckersAlone")}, {}, r"capacity: the options of TypedForCheckersAlone have no"),
        ({"capacity": own("Uncheckable")}, {"thing": 1}, r"options\.thing: its type, .* cannot be checked"),
        ({"capacity": own("StatesNonsense")}, {}, r"capacity StatesNonsense: reserves_prompt is 'sometimes', none of "),
        ({"capacity": own("Moody")}, {}, r"capacity Moody: reserves_prompt is <property object .*, none of "),
        ({"preemption": own("Sideways")}, {}, r"preemption Sideways: requeue is 'sideways', none of "),
        ({}, {"ageing_per_s": -1}, r"options\.ageing_per_s: Input should be greater than or equal to 0"),
    ],
)
def test_an_error_names_the_wrong_policy_or_option(
    overrides: dict[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=f"^{message}"):
        build(choose("", overrides, options))


def test_a_policy_class_may_have_a_declared_attribute_in_python_slots() -> None:
    assert build(choose("", {"capacity": own("Slotted")})).capacity.reserves_prompt


def test_a_given_option_must_belong_to_a_chosen_policy() -> None:
    """A scenario may have options of another preset. The settings of a server must be for its own policies."""
    given = {"watermark": 0.5, "chunked_prefill": True}
    choice = choose("sglang", options=given)
    assert build(choice), "build ignores options of policies that are not chosen"
    with pytest.raises(
        PolicyError, match=r"^options\.watermark: none of the policies .* token-ratio \(init_new_token_"
    ):
        check_given(choice, given)
    check_given(choice, {"chunked_prefill": True})


class Shaped(FirstComeFirstServed):
    def __init__(self, pair: tuple[int, int] = (1, 2), names: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.pair, self.names = pair, names


def test_an_option_of_a_type_that_json_lacks_is_given_as_a_list() -> None:
    order = build(choose("", {"order": own("Shaped")}, {"pair": [3, 4], "names": ["a"]})).order
    assert isinstance(order, Shaped)
    assert (order.pair, order.names) == ((3, 4), frozenset({"a"}))
    with pytest.raises(PolicyError, match=r"options\.pair"):
        build(choose("", {"order": own("Shaped")}, {"pair": [3, "4"]}))


@pytest.mark.parametrize(("order", "option"), [(own("Shaped"), "pair"), ("priority", "ageing_per_s")])
def test_options_go_with_their_policy(order: str, option: str) -> None:
    """A change of the order drops the options of the old order, and keeps those of other policies."""
    before = choose("paceline", {"order": order}, {option: [3, 4] if option == "pair" else 0.5, "watermark": 0.1})
    build(before)
    after = choose(overrides={"order": "fcfs"}, base=before)
    build(after)
    assert after.options == {**PRESETS["paceline"].options, "watermark": 0.1}
    assert choose(options={"watermark": 0.2}, base=before).options[option] == before.options[option]


@pytest.mark.parametrize(
    ("code", "words"),
    [("import sys; sys.exit('done')", "done"), ("import asyncio; raise asyncio.CancelledError", "CancelledError")],
)
def test_a_module_that_exits_on_import_is_no_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, words: str
) -> None:
    name = f"ends_with_{words.lower()}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PolicyError, match=f"order: {name}:X cannot be imported: {words}"):
        find("order", f"{name}:X")


class Exits(FirstComeFirstServed):
    def __init__(self) -> None:
        raise SystemExit("done")


def test_a_policy_that_exits_while_it_is_built_is_refused() -> None:
    with pytest.raises(PolicyError, match="order Exits: done"):
        build(choose("", {"order": own("Exits")}))
