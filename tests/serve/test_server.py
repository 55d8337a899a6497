"""A server's limits, its end, its page, and the files it is given."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Refuse
from tests.support.serving import Server, make_checkpoint, serving, wait_for_url, write_plan
from tests.support.spawn import start_command, wait_until
from yuan_train.cli.main import main

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

LONG = {"prompt": [65], "max_tokens": 4000, "temperature": 0}
"""Takes many seconds, unless it is given up."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served") / "ck", endless=True)


def health(server: Server) -> tuple[int, int]:
    told = httpx.get(f"{server.url}health").json()
    return told["running"], told["waiting"]


def open_stream(client: Any) -> Any:
    return client.send(
        client.build_request("POST", "/v1/completions", json=LONG | {"stream": True}), stream=True
    )


def test_a_full_queue_and_clients_that_leave(checkpoint: Path, tmp_path: Path) -> None:
    """Two slots and two that wait; the fifth is refused, until one of the four leaves."""
    with (
        serving(checkpoint, tmp_path, "--slots", "2", "--queue", "2") as server,
        httpx.Client(base_url=server.url, timeout=30) as client,
    ):
        streams = [open_stream(client) for _ in range(4)]
        wait_until(lambda: health(server) == (2, 2))
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        # One that is written leaves, and one that waits takes its slot.
        streams[0].close()
        wait_until(lambda: health(server) == (2, 1))
        streams[3].close()
        wait_until(lambda: health(server) == (2, 0))
        # Nor does one that is not streamed hold a slot when its client has left.
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG, timeout=0.3)
        for stream in streams:
            stream.close()
        wait_until(lambda: health(server) == (0, 0))
        assert client.post("/v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200


def test_a_request_that_takes_too_long(checkpoint: Path, tmp_path: Path) -> None:
    with serving(checkpoint, tmp_path, "--timeout", "0.5") as server:
        url = f"{server.url}v1/completions"
        whole = httpx.post(url, json=LONG, timeout=30)
        assert (whole.status_code, whole.json()["error"]["code"]) == (408, "timeout")
        streamed = httpx.post(url, json=LONG | {"stream": True}, timeout=30)
        assert '"code": "timeout"' in streamed.text.strip().splitlines()[-1]
        wait_until(lambda: health(server) == (0, 0))


def test_the_end_under_load(checkpoint: Path, tmp_path: Path) -> None:
    """Who waits is told, and all ranks end with 0, as they do on SIGTERM (test_answers.py)."""
    plan = write_plan(tmp_path, "1x1: 2@0 | 2@1")
    with serving(checkpoint, tmp_path, plan=plan, num_ranks=2) as server:
        told: list[str] = []
        asking = threading.Thread(
            target=lambda: told.append(
                httpx.post(f"{server.url}v1/completions", json=LONG | {"stream": True}, timeout=30).text
            )
        )
        asking.start()
        wait_until(lambda: health(server) == (1, 0))
        pid = server.ranks[0].process.pid
        assert pid is not None
        os.kill(pid, signal.SIGINT)
        for rank in server.ranks:
            code, said = rank.wait(within_seconds=30)
            assert (code, "Traceback" in said) == (0, False), said
        asking.join(30)
        assert '"code": "stopped"' in told[0]


def test_a_lost_rank_ends_the_server(checkpoint: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "1x1: 2@0 | 2@1")
    with serving(checkpoint, tmp_path, plan=plan, num_ranks=2) as server:
        assert httpx.post(f"{server.url}v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
        server.ranks[1].kill()
        code, said = server.ranks[0].wait(within_seconds=60)
        assert code == 1
        assert "rank 1" in said


def test_it_starts_the_ranks_of_a_plan_itself(checkpoint: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, "1x1: 2@0 | 2@1")
    words = ["serve", "--checkpoint", checkpoint, "--plan", plan, "--port", "0", "--device", "cpu"]
    command = start_command(words, tmp_path / "stderr", environment={"OMP_NUM_THREADS": "1"})
    try:
        url = wait_for_url(command)
        assert httpx.post(f"{url}v1/completions", json=LONG | {"max_tokens": 3}).status_code == 200
        assert command.process.pid is not None
        os.kill(command.process.pid, signal.SIGTERM)
        assert command.wait(within_seconds=30)[0] == 0
    finally:
        command.kill()


def test_it_prints_the_commands_of_nodes(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = write_plan(tmp_path, "1x1: 2@0 | 2@1")
    words = ["serve", "--checkpoint", str(checkpoint), "--plan", str(plan), "--slots", "3", "--print"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert told.startswith("torchrun --nnodes=1") and "serve --checkpoint" in told and "--slots 3" in told
    assert "--allow-weights" not in told
    assert main([*words, "--allow-weights"]) == 0
    assert "--allow-weights" in capsys.readouterr().out


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """The request fails with the reason; the server does not."""
    import torch

    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.checkpoint.save import save_checkpoint
    from yuan_train.train.evaluate import load_trained

    good = find_checkpoint(make_checkpoint(tmp_path / "good"))
    model = load_trained(good).model
    tensors = {f"weights.{name}": weight.detach() for name, weight in model.named_parameters()}
    tensors["weights.layers.2.feed_forward_norm.weight"] = torch.full((64,), float("nan"))
    save_checkpoint(tmp_path / "bad", step=1, tensors=tensors, state=dict(good.state))
    with serving(tmp_path / "bad", tmp_path) as server:
        for stream in (False, True):
            reply = httpx.post(f"{server.url}v1/completions", json=LONG | {"stream": stream}, timeout=30)
            assert reply.status_code == (200 if stream else 500)
            assert "not_finite" in reply.text
        assert health(server) == (0, 0)


def test_the_page_in_a_browser(checkpoint: Path, tmp_path: Path) -> None:
    browsers = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
    browser = next((found for name in browsers if (found := shutil.which(name))), None)
    with serving(checkpoint, tmp_path) as server:
        page = httpx.get(server.url)
        assert page.headers["content-type"].startswith("text/html")
        assert not re.search(r"(src|href)=", page.text), "the page needs nothing from elsewhere"
        if browser is None:
            pytest.skip("there is no Chromium")
        shown = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"),
                *(f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", server.url),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert 'Try <span id="model">tiny</span>' in shown.stdout, shown.stderr[-500:]


# --- what it is given ------------------------------------------------------------------------------------


def test_what_cannot_be_served(
    checkpoint: Path, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("serve", "--checkpoint", checkpoint, "--device", "cpu")
    assert "--slots: 0; wanted 1 to 4096" in refuse(*given, "--slots", 0)
    assert "--timeout: nan; wanted seconds above 0" in refuse(*given, "--timeout", "nan")
    assert "max_sequence_length is" in refuse(*given, "--max-length", 999999)
    assert "no such directory" in refuse("serve", "--checkpoint", tmp_path / "none")
    assert "cannot listen there" in refuse(*given, "--host", "203.0.113.7", "--port", 0)
    other = write_plan(tmp_path, "1x1: 4@0", hidden_size=128)
    assert "hidden_size 64 there, 128 here" in refuse(*given, "--plan", other)
    half = write_plan(tmp_path, "1x1: 1.5@0 | 2.5@1")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("yuan_train.cli.serve.is_rank_of_several", lambda: True)
    assert "half a layer does not generate" in refuse(*given, "--plan", half)


def test_without_the_packages(checkpoint: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "fastapi" else find(name, *more)
    )
    told = refuse("serve", "--checkpoint", checkpoint)
    assert "serve needs fastapi, not installed here; run: pip install" in told


def test_the_command_imports_no_web_server_before_it_serves() -> None:
    code = "import sys, yuan_train.cli.serve; print({'fastapi', 'uvicorn', 'torch'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.strip() == "set()"
