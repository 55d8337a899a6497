"""Models by their names on the Hub, with a server on this machine in its place."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hf_decoders import write_llama
from tests.support.serving import Quiet, answering
from tests.support.spawn import start_command
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.cli.main import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "example/tiny-llama"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub with one model, and what was fetched from it."""
    folder = write_llama(tmp_path / "published")
    (folder / "evil.py").write_text("raise SystemExit")
    fetched: list[str] = []

    class Hub(Quiet):
        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            headers = {"Content-Type": "application/json"}
            if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/{COMMIT}"):
                files = [{"rfilename": file.name} for file in sorted(folder.iterdir())]
                content = json.dumps({"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": files}).encode()
            elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
                name = path.rpartition("/")[2]
                content = (folder / name).read_bytes()
                headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
                if body:
                    fetched.append(name)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "RepoNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(200)
            for key, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

    with answering(Hub) as url:
        yield url, fetched


def test_a_name_is_fetched(
    hub: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No code comes along; the model is called as on the Hub; a name that is not there says what to do."""
    address, fetched = hub
    own = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    said = tmp_path / "said"

    def run(name: str, out: str) -> tuple[int, str]:
        words = ["import-hf", name, "--out", tmp_path / out]
        command = start_command(words, tmp_path / "stderr", stdout=said, environment=own, cwd=tmp_path)
        return command.wait(within_seconds=120)

    code, error = run(NAME, "runs")
    assert code == 0, error
    found = find_checkpoint(tmp_path / "runs")
    assert found.model.name == "tiny-llama" and found.tokenizer is not None
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(fetched)
    assert "evil.py" not in fetched
    assert f"checkpoint: {tmp_path / 'runs'}" in said.read_text() and "yuan-train init" in said.read_text()
    own["HF_ENDPOINT"] = "http://127.0.0.1:9"
    code, error = run("example/absent", "other")
    assert code == 2 and "http://127.0.0.1:9 is not reached from here" in error
    assert "hf download" in error and "object at" not in error and len(error) < 500
    own["HF_ENDPOINT"] = address
    code, error = run("example/absent", "other")
    assert code == 2 and "the Hub does not give it" in error and "hf download example/absent" in error
    assert not (tmp_path / "other").exists()


def test_an_export_is_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    calls: list[tuple[str, Any]] = []

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            calls.append(("create", (name, private, exist_ok)))
            return f"https://example.invalid/{name}"

        def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
            calls.append(("upload", (repo_id, sorted(path.name for path in Path(folder_path).iterdir()))))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    folder, out = write_llama(tmp_path / "llama"), tmp_path / "out"
    assert main(["import-hf", str(folder), "--out", str(tmp_path / "runs")]) == 0
    words = ["export-hf", str(tmp_path / "runs"), "--out"]
    assert main([*words, str(out), "--push", "wrong name"]) == 2
    assert not out.exists() and not calls
    assert main([*words, str(out), "--push", NAME]) == 0
    assert "on the Hub: https://example.invalid" in capsys.readouterr().out
    assert calls[0] == ("create", (NAME, True, True))
    assert calls[1][1][0] == NAME and "model.safetensors" in calls[1][1][1]

    def refuse(self: Api, **_: Any) -> None:
        raise OSError("401 Unauthorized")

    monkeypatch.setattr(Api, "upload_folder", refuse)
    assert main([*words, str(tmp_path / "second"), "--push", NAME]) == 2
    assert "401 Unauthorized" in (text := capsys.readouterr().err) and "hf auth login" in text
