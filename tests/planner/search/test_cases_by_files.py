"""`yuan-train plan` from input files to plan.yaml, on the golden cases and random ones, against brute
force."""

import json

import numpy as np
import pytest
import yaml

from tests.planner.instances import CASES, brute_force, event_simulation, random_case
from yuan_train.cli.main import main
from yuan_train.config.plan_constraints import load_plan

NAMES = [f"n{i}" for i in range(8)]


def write_files(case, folder, *, ends_in_layers):
    """Write cluster.yaml, model.yaml and profile.json of a case. Its first and last layer become embedding
    and head; with `ends_in_layers` all its layers are layers, and embedding and head cost nothing."""
    layers, devices = case["layers"], case["devices"]
    body = layers if ends_in_layers else layers[1:-1]
    nodes, described, kinds = [], {}, {}
    for i, device in enumerate(devices):
        key = (device["type"], device["mem_bytes"], device.get("reserved_bytes", 0))
        name = kinds.setdefault(key, f"{device['type']}-{len(kinds)}")
        described[name] = {
            "memory": f"{key[1]} B",
            "reserved": f"{key[2]} B",
            "fp32": "1 TFLOP/s",
            "bf16": "1 TFLOP/s",
            "memory_bandwidth": "1 GB/s",
        }
        nodes.append({"name": NAMES[i], "device": name, "network": {"bandwidth": "1 GB/s"}})
    (folder / "cluster.yaml").write_text(
        yaml.safe_dump({"name": "case", "nodes": nodes, "device_types": described})
    )
    model = {
        "name": "case",
        "num_layers": len(body),
        "hidden_size": 8,
        "num_attention_heads": 2,
        "ffn_hidden_size": 16,
        "vocab_size": 32,
        "max_sequence_length": 16,
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(model))

    def unit(layer, kind):
        return {
            "forward_seconds": layer["fwd"][kind],
            "backward_seconds": layer["bwd"][kind],
            "state_bytes": layer["weight_bytes"],
            "activation_bytes": layer["act_bytes"],
            "output_bytes": layer["out_bytes"],
        }

    nothing = dict.fromkeys(unit(layers[0], devices[0]["type"]), 0)
    entries = [
        {
            "device_type": name,
            "embedding": nothing if ends_in_layers else unit(layers[0], key[0]),
            "layers": [unit(layer, key[0]) for layer in body],
            "head": nothing if ends_in_layers else unit(layers[-1], key[0]),
        }
        for key, name in kinds.items()
    ]
    sizes = sorted({1.0, 1e12, *(float(layer["out_bytes"]) for layer in layers)})
    links = [
        {
            "from": f"{NAMES[i]}/0",
            "to": f"{NAMES[j]}/0",
            "message_bytes": sizes,
            "seconds": [
                case["links"]["latency"][i][j] + size / case["links"]["bandwidth"][i][j] for size in sizes
            ],
        }
        for i in range(len(devices))
        for j in range(len(devices))
        if i != j
    ]
    profile = {"version": 1, "sequence_length": 16, "entries": entries, "links": links}
    (folder / "profile.json").write_text(json.dumps(profile))


def plan_case(case, folder, *, ends_in_layers):
    """(order, units of each stage) of the written plan; None if the planner exits without one."""
    folder.mkdir(exist_ok=True)
    write_files(case, folder, ends_in_layers=ends_in_layers)
    overrides = [
        "search.pipelines=[1]",
        "search.recompute=[none]",
        f"search.use_all_devices={str(case['use_all_devices']).lower()}",
        f"search.overlap={str(case['overlap']).lower()}",
        f"train.global_batch_size={case['num_microbatches']}",
        f"search.device_order={'fixed' if case['order'] else 'free'}",
    ]
    files = [x for name in ("cluster", "model") for x in (f"--{name}", str(folder / f"{name}.yaml"))]
    out = folder / "plan.yaml"
    # The optimum is known for all of a card's memory.
    keys = ["search.memory_fraction=1", *overrides]
    code = main(["plan", *files, "--profile", str(folder / "profile.json"), "--out", str(out), *keys])
    if code:
        assert code in (2, 3) and not out.exists()
        return None
    plan = load_plan(out)
    (pipeline,) = plan.pipelines
    order = tuple(NAMES.index(plan.ranks[s.ranks[0]].device.split("/")[0]) for s in pipeline.stages)
    extra = 0 if ends_in_layers else 1
    counts = [s.num_layers + extra * s.embedding + extra * s.head for s in pipeline.stages]
    return order, tuple(counts)


def check_case(case, folder, *, ends_in_layers):
    """The written plan fits and is as fast as the brute force's best; if nothing fits, there is none."""
    case = {"use_all_devices": True, "overlap": True, "order": None} | case
    if case["order"]:
        case = reordered(case)
    best = brute_force(case)
    found = plan_case(case, folder, ends_in_layers=ends_in_layers)
    if best is None:
        assert found is None
        return
    assert found is not None, "the planner found no plan, but one fits"
    order, counts = found
    assert all(counts) and sum(counts) == len(case["layers"])
    assert event_simulation(case, order, tuple(map(int, counts))) <= best * (1 + 1e-6)


def reordered(case):
    """The case with its devices listed in its fixed order, because a cluster file's order is the fixed
    order."""
    order = case["order"]
    links = {key: np.array(case["links"][key])[np.ix_(order, order)].tolist() for key in case["links"]}
    devices = [case["devices"][i] for i in order]
    return case | {"devices": devices, "links": links, "order": list(range(len(order)))}


@pytest.mark.parametrize("ends_in_layers", [False, True])
@pytest.mark.parametrize("name", list(CASES))
def test_known_optimum(name, ends_in_layers, tmp_path):
    check_case(CASES[name]["case"], tmp_path / "case", ends_in_layers=ends_in_layers)


@pytest.mark.parametrize("block", range(2))
def test_random_problems(block, tmp_path):
    for seed in range(25 * block, 25 * (block + 1)):
        check_case(random_case(seed), tmp_path / str(seed), ends_in_layers=seed % 2 == 1)
