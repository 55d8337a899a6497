"""Which card a rank takes, and which it refuses, by what torch would tell of cards that are not here."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.parallel.test_grid import run_of
from tests.support.fake_card import FakeCard
from tests.support.project import make_plan, on_devices, parse_plan, run_config, with_forecast
from yuan_train.config.devices import CATALOGUE, GIB
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.model import LoraConfig
from yuan_train.config.plan import Plan, RankPlan, copied_bytes, snapshot_bytes
from yuan_train.config.run import HostCopies
from yuan_train.parallel.device import CardFacts, CardMemory
from yuan_train.train import agreement
from yuan_train.train import job as job_module
from yuan_train.train.agreement import (
    Needs,
    RankCard,
    check_card_memory,
    find_fault,
    host_note,
    needs_of,
    node_lines,
)
from yuan_train.train.job import (
    Position,
    check_card,
    choose_card,
    choose_device,
    choose_planned,
    has_code_for,
    prepare,
    types_here,
)
from yuan_train.train.run import train

CU130 = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")
CU126 = ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90")


def card(
    name: str, type_name: str, capability: tuple[int, int] = (8, 0), bus: int = 1, **changes: object
) -> CardFacts:
    facts = CardFacts(
        name=name,
        memory=CATALOGUE[type_name].memory,
        capability=capability,
        has_bf16=capability >= (8, 0),
        architectures=CU130,
        cuda="13.0",
        driver="13.0",
        pci_address=f"0000:{bus:02x}:00.0",
    )
    return replace(facts, **changes)  # pyright: ignore[reportArgumentType]


R4090 = card("NVIDIA GeForce RTX 4090", "RTX-4090", (8, 9))
R3090 = card("NVIDIA GeForce RTX 3090", "RTX-3090", (8, 6))
V100 = card("Tesla V100-SXM2-32GB", "V100-32G", (7, 0))
OTHER = card("Some New Card", "A100-80G")


def chosen(wanted: list[str], seen: list[CardFacts]) -> list[int]:
    return [choose_card(wanted, rank, len(wanted), seen) for rank in range(len(wanted))]


def test_a_rank_takes_the_card_of_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA numbers the fastest card first, nvidia-smi by the bus, and a cluster file as it likes."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    box = [R4090, R3090, R4090, R3090]
    assert chosen(["RTX-4090", "RTX-4090", "RTX-3090", "RTX-3090"], box) == [0, 2, 1, 3]
    assert chosen(["RTX-3090", "RTX-4090"], box) == [1, 0]
    # Like cards keep their numbers, so do those that no name tells apart, and a run without a plan's types.
    assert chosen(["RTX-4090"] * 2, [R4090] * 2) == [0, 1]
    assert chosen(["Mine"] * 2, [R4090] * 2) == [0, 1]
    assert choose_card((), 2, 4, box) == 2
    # What the cluster file alone describes takes what is left.
    assert chosen(["Mine", "RTX-4090"], [R4090, OTHER]) == [1, 0]


def test_a_launcher_that_shows_each_process_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert chosen(["RTX-4090"] * 4, [R4090]) == [0, 0, 0, 0]
    # Otherwise a single card for several processes is a mistake.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="has 1 cards, but 4 processes"):
        choose_card((), 0, 4, [R4090])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match=r"2 cards that CUDA_VISIBLE_DEVICES=0,1 shows, but 4 processes"):
        choose_card((), 0, 4, [R4090, R4090])


def test_another_card_than_the_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    entry = RankPlan(rank=5, device="box/1", type="RTX-4090")
    check_card(entry, 1, [R3090, R4090])
    with pytest.raises(ConfigError) as caught:
        check_card(entry, 0, [R3090, R4090])
    said = str(caught.value)
    assert said.startswith(
        "rank 5 (box/1): the plan has a card of type RTX-4090 there, but cuda:0 is RTX-3090"
    )
    assert "this process sees RTX-3090, RTX-4090 with CUDA_VISIBLE_DEVICES=1,0" in said
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in said
    # Names that cannot be compared are no reason to refuse.
    check_card(replace(entry, type="Mine"), 0, [R3090])
    check_card(entry, 0, [OTHER])


def test_a_process_takes_its_card_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """From what torch shows to the device that a rank computes on."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    box = [FakeCard(name=one.name, memory=one.memory, capability=one.capability) for one in (R4090, R3090)]
    types = {0: "RTX-3090", 1: "RTX-4090"}
    ranks = [RankPlan(rank=rank, device=f"box/{rank}", type=name) for rank, name in types.items()]
    for rank, number in ((0, 1), (1, 0)):
        position = Position(rank, 2, rank, 2)
        position = replace(position, types=types_here(ranks, position))
        assert choose_device("auto", position, ranks[rank], cards=lambda: box) is box[number]
    with pytest.raises(ConfigError, match="rank 0.* type RTX-3090 there, but cuda:0 is RTX-4090"):
        choose_device("auto", Position(0, 2, 0, 1), ranks[0], cards=lambda: box[:1])
    assert choose_device("cpu", Position(), ranks[0], cards=lambda: box).is_card is False


def test_a_simulated_card_is_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with cards too, where the quick start runs."""
    monkeypatch.setattr(job_module, "choose_device", partial(choose_device, cards=lambda: [FakeCard()]))
    ranks = [RankPlan(rank=0, device="box/0", type="Slow")]
    slow = replace(CATALOGUE["A100-80G"], slowdown=2.0)
    assert not choose_planned("auto", ranks, Position(), lambda name: slow).is_card
    assert choose_planned("auto", ranks, Position(), lambda name: replace(slow, slowdown=None)).is_card


def test_a_planned_card_that_torch_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of a card does not train on its processor without a word."""
    monkeypatch.setattr(job_module, "choose_device", partial(choose_device, cards=list))
    ranks = [RankPlan(rank=0, device="box/0", type="RTX-4090")]
    for wanted in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="no card|finds none"):
            choose_planned(wanted, ranks, Position(), CATALOGUE.get)
    assert not choose_planned("cpu", ranks, Position(), CATALOGUE.get).is_card
    unknown = [replace(ranks[0], type="unknown")]
    assert not choose_planned("auto", unknown, Position(), CATALOGUE.get).is_card


def test_the_types_of_a_machines_processes() -> None:
    """By the plan's nodes where they are the machines, or as torchrun numbers the ranks."""
    names = ["a/0", "b/0", "a/1"]
    ranks = [RankPlan(rank=i, device=name, type=f"T{i}") for i, name in enumerate(names)]
    # Roles apart: the ranks of a node need not follow each other.
    assert types_here(ranks, Position(2, 3, 1, 2)) == ("T0", "T2")
    assert types_here(ranks, Position(1, 3, 0, 1)) == ("T1",)
    # All ranks on one machine, or on machines other than the plan's nodes.
    assert types_here(ranks, Position(1, 3, 1, 3)) == ("T0", "T1", "T2")
    assert types_here(ranks, Position(1, 3, 1, 2)) == ("T0", "T1")
    assert types_here(ranks[:2], Position(1, 2, 3, 4)) == ()


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((7, 0), CU130, False),
        ((7, 0), CU126, True),
        ((8, 9), CU130, True),  # by the code of sm_86
        ((8, 7), ("sm_80", "sm_90"), True),
        ((8, 0), ("sm_86", "sm_90"), False),
        ((12, 0), CU126, False),  # no later code, and no PTX
        ((12, 1), (*CU126, "compute_90"), True),
        ((7, 5), ("compute_80",), False),
        ((9, 0), ("sm_90a",), True),
        ((10, 0), ("sm_90a",), False),
        ((10, 3), ("sm_100f",), True),
        ((9, 4), ("gfx942",), True),
        ((8, 0), (), True),
    ],
)
def test_the_cards_that_a_torch_has_code_for(
    capability: tuple[int, int], architectures: tuple[str, ...], runs: bool
) -> None:
    assert has_code_for(capability, architectures) == runs


def test_a_card_without_code_names_the_wheel() -> None:
    entry = RankPlan(rank=0, device="old/0", type="V100-32G")
    with pytest.raises(
        ConfigError, match=r"rank 0 \(old/0\): torch .* no code for Tesla V100.*index of its cu126 builds"
    ):
        check_card(entry, 0, [V100])
    check_card(entry, 0, [replace(V100, architectures=CU126)])
    blackwell = card("NVIDIA GeForce RTX 5090", "RTX-5090", (12, 0), architectures=CU126)
    with pytest.raises(ConfigError, match="its cu130 builds"):
        check_card(RankPlan(rank=0, device="new/0", type="RTX-5090"), 0, [blackwell])


def test_why_there_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in job_module.why_no_card()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(job_module, "cuda_of_driver", lambda: None)
    assert job_module.why_no_card() == "no driver is loaded"
    monkeypatch.setattr(job_module, "cuda_of_driver", lambda: "12.2")
    assert "the driver knows CUDA up to 12.2" in job_module.why_no_card()
    assert "cu126 builds" in job_module.why_no_card()
    monkeypatch.setattr(job_module, "cuda_of_driver", lambda: "13.1")
    assert "shows none" in job_module.why_no_card()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert job_module.why_no_card() == "CUDA_VISIBLE_DEVICES=-1 hides all cards"


def told(rank: int, host: str, facts: CardFacts, **changes: object) -> RankCard:
    own = RankCard(
        rank=rank,
        host=host,
        machine=f"started as {host}",
        device=f"{host}/{rank}",
        facts=facts,
        uses_nccl=True,
        driver="580.65.06",
        nccl="2.28.9",
    )
    return replace(own, **changes)  # pyright: ignore[reportArgumentType]


def test_what_the_cards_of_all_ranks_have_in_common() -> None:
    second = replace(R4090, pci_address="0000:02:00.0")
    alike = [told(0, "a", R4090), told(1, "a", second), told(2, "b", R4090)]
    assert find_fault(alike) is None
    lines = list(node_lines(alike))
    assert lines[0].startswith(
        "a: ranks 0, 1: 2 x RTX-4090 (23.5 GiB, sm_89); driver 580.65.06, CUDA 13.0, NCCL"
    )
    assert len(lines) == 2
    same = [told(0, "a", R4090), told(1, "a", R4090)]
    assert "ranks 0 (a/0) and 1 (a/1) of a have the same card" in str(find_fault(same))
    # Of two machines of one name, both may have a card there.
    assert find_fault([same[0], replace(same[1], machine="another")]) is None
    # gloo allows it; and slices of a card are cards of their own.
    slice_name = "NVIDIA A100-SXM4-80GB MIG 3g.40gb"
    assert find_fault([replace(one, facts=replace(one.facts, name=slice_name)) for one in same]) is None
    assert find_fault([replace(one, uses_nccl=False) for one in same]) is None
    unlike = [*alike, told(3, "c", R4090, nccl="2.27.3")]
    assert "NCCL is 2.28.9 on rank 0 (a), but rank 3 (c) 2.27.3" in str(find_fault(unlike))
    assert find_fault([*alike, told(3, "c", R4090, nccl="2.27.3", uses_nccl=False)]) is None


def forecast_plan() -> Plan:
    """Two virtual stages of rank 0 and one of rank 1; each has the 21 GiB of its card, 1 GiB reserved."""
    plan = on_devices(parse_plan(run_of(3, 1), "1x1: 1@0 | 1@1 | 1@0"), "a/0", "a/1")
    plan = replace(plan, ranks=tuple(replace(rank, type="RTX-4090") for rank in plan.ranks))
    memory = {"parameters": 20.0 * GIB, "reserved": GIB}
    return with_forecast(plan, memory=memory, host_bytes=4.5 * GIB)


def test_the_forecast_beside_the_memory_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = forecast_plan()
    needs = Needs(card=21.0 * GIB, reserved=GIB, host=4.5 * GIB)
    assert needs_of(plan, 0) == needs
    assert needs_of(replace(plan, forecast=None), 0) is None
    total = R4090.memory
    idle = CardMemory(total, total - GIB, 0, 0, 0, 0)
    assert check_card_memory(plan.ranks[0], needs, idle, R4090) is None
    monkeypatch.setattr(agreement, "card_users", lambda address: ["process 12 (python, 8000 MiB)"])
    note = check_card_memory(plan.ranks[0], needs, replace(idle, free=total - 8 * GIB), R4090)
    assert note is not None and note.startswith("rank 0 (a/0): the plan's forecast takes 20.0 GiB of NVIDIA")
    assert "15.5 GiB of 23.5 GiB are free" in note and "process 12 (python, 8000 MiB)" in note
    # What this process's allocator has and no tensor holds is free as well.
    ours = replace(idle, free=total - 8 * GIB, reserved=7 * GIB)
    assert check_card_memory(plan.ranks[0], needs, ours, R4090) is None
    with pytest.raises(PlanError, match=r"rank 0 \(a/0\).* 24.0 GiB at its peak, and .* has 23.5 GiB in all"):
        check_card_memory(plan.ranks[0], replace(needs, card=24.0 * GIB), idle, R4090)


def test_the_forecast_beside_the_memory_of_the_host() -> None:
    plan = forecast_plan()
    assert host_note(plan, plan.ranks[0], 9.0 * GIB) is None
    note = host_note(plan, plan.ranks[0], 8.0 * GIB)
    assert note is not None and "node a: by the plan's forecast its 2 ranks put 9.0 GiB on the host" in note
    # One rank says it for all of the node.
    assert host_note(plan, plan.ranks[1], 8.0 * GIB) is None


def test_saves_in_the_background_count_in_the_memory_of_the_host() -> None:
    """The second stage is the only one of its rank; the first rank holds the others, embedding and head."""
    plan = forecast_plan()
    embedding, *layers, head = plan.model.trained_unit_parameters
    for ranks, held in (({0}, embedding + 2 * layers[0] + head), ({1}, layers[1]), ({0, 1}, sum(layers))):
        ends = embedding + head if len(ranks) == 2 else 0
        assert snapshot_bytes(plan, ranks, bytes_per_parameter=12) == 12 * (held + ends)
    (pipeline,) = plan.pipelines
    both = replace(plan, pipelines=(pipeline, pipeline))
    assert snapshot_bytes(both, {0, 1}, bytes_per_parameter=12) == 12 * plan.model.parameters
    assert host_note(plan, plan.ranks[0], 9.0 * GIB) is None
    note = host_note(plan, plan.ranks[0], 9.0 * GIB, copies=HostCopies(snapshots=1))
    assert note is not None and "(checkpoint.asynchronous)" in note and "put 9.0 GiB on the host and" in note


def test_copies_in_memory_are_counted_on_two_hosts() -> None:
    """Two of each, of the own ranks and of the node before; of frozen weights the weights alone."""
    alone = forecast_plan()
    plan = on_devices(alone, "a/0", "b/0")
    state, copies = 12 * plan.model.parameters, HostCopies(kept=2)
    assert copied_bytes(plan, "a", copies) == copied_bytes(plan, "b", copies) == 2 * state
    assert copied_bytes(alone, "a", copies) == 2 * state
    assert copied_bytes(alone, "a", HostCopies(snapshots=1, kept=2)) == 3 * state
    adapters = replace(plan, model=replace(plan.model, lora=LoraConfig(rank=4)))
    trained = sum(adapters.model.trained_unit_parameters)
    frozen = adapters.model.parameters - trained
    found = copied_bytes(adapters, "a", HostCopies(kept=2, frozen_bytes=2))
    assert found == pytest.approx(2 * (12 * trained + 2 * frozen)) and frozen > trained


def test_who_else_is_on_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    lines = "00000000:01:00.0, 12, python, 8000 MiB\\n00000000:02:00.0, 13, Xorg, 100 MiB"
    program.write_text(f"#!/bin/sh\nprintf '{lines}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert agreement.card_users("0000:01:00.0") == ["process 12 (python, 8000 MiB)"]
    program.unlink()
    assert agreement.card_users("0000:01:00.0") == []


def test_a_run_on_a_card(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole of `train`, on a card that torch does not have: taken by type, compared with the forecast."""
    run = run_config(run_file, "train.device=auto", "train.steps=1", "validation.every=0")
    plan = make_plan(run, [[6]])
    plan = replace(plan, ranks=(replace(plan.ranks[0], device="box/0", type="RTX-4090"),))
    small = CATALOGUE["RTX-3090"].memory
    box = [
        FakeCard(name="NVIDIA GeForce RTX 3090", memory=small, capability=(8, 6)),
        FakeCard(name="NVIDIA GeForce RTX 4090", memory=small, capability=(8, 9), outside=20 * GIB),
    ]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(job_module, "choose_device", partial(choose_device, cards=lambda: box))
    monkeypatch.setattr(agreement, "card_users", lambda address: ["process 12 (python, 20480 MiB)"])
    forecast = forecast_plan().forecast
    assert forecast is not None
    job = prepare(run, replace(plan, forecast=replace(forecast, stages=forecast.stages[:1])), Position())
    assert job.device is box[1]
    with caplog.at_level(logging.INFO, "yuan_train"):
        train(job)
    assert ": rank 0: 1 x RTX-4090 (23.5 GiB, sm_89); CUDA 12.8" in caplog.text
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "rank 0 (box/0): the plan's forecast takes 20.0 GiB" in warning and "process 12" in warning
    too_much = replace(forecast.stages[0], peak_memory_bytes=25.0 * GIB)
    job = prepare(run, replace(plan, forecast=replace(forecast, stages=(too_much,))), Position())
    with pytest.raises(PlanError, match="25.0 GiB at its peak, and NVIDIA GeForce RTX 4090 has 23.5 GiB"):
        train(job)


def test_a_rank_waits_for_two_steps_at_least(run_file: Path) -> None:
    run, plan = run_config(run_file, "train.timeout=600 s"), forecast_plan()
    assert plan.forecast is not None
    for step_seconds, waited in ((299.0, 600.0), (400.0, 800.0)):
        slow = replace(plan, forecast=replace(plan.forecast, step_seconds=step_seconds))
        assert job_module.wait_for_steps(run, slow).train.timeout == waited
    assert job_module.wait_for_steps(run, replace(plan, forecast=None)).train.timeout == 600
